"""Torch's arithmetic settings: changed for a block, and restored to those of another process."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.arithmetic import Arithmetic, differences
from port_planner.ir.torch_arithmetic import ONEDNN, PRODUCT_SETTINGS, arithmetic


class UnavailableArithmeticError(PortError):
    """Earlier steps were computed with settings that this build of torch or this processor lacks."""

    exit_code = ExitCode.IMPOSSIBLE


def set_arithmetic(then: Arithmetic) -> None:
    """Compute with the settings of `then` from now on.

    Raises UnavailableArithmeticError, which names those that are unavailable here.
    """
    _change(arithmetic(), then)
    lacking = list(differences(arithmetic(), then))
    if lacking:
        raise UnavailableArithmeticError(
            f"the steps so far were computed with settings that torch cannot use here ({'; '.join(lacking)}): "
            "continue where they were computed, or start again"
        )


@contextmanager
def computing_as(then: Arithmetic) -> Iterator[None]:
    """Run the block with the settings of `then`; afterwards the previous settings are restored, even
    if the block changed them.
    """
    now = arithmetic()
    _change(now, then)
    try:
        yield
    finally:
        _change(arithmetic(), now)


def unchanged_arithmetic() -> AbstractContextManager[None]:
    """Keep a block from changing the settings, as a product that oneDNN refuses would."""
    return computing_as(arithmetic())


def _change(before: Arithmetic, after: Arithmetic) -> None:
    if before.threads != after.threads:
        torch.set_num_threads(after.threads)
    if before.onednn != after.onednn:
        ONEDNN.set_flags(after.onednn, _fp32_precision=None)  # what `disable_global_flags` does not forbid
    for kind, old, new in zip(PRODUCT_SETTINGS, before.precisions, after.precisions, strict=True):
        if old != new:
            kind.fp32_precision = new
    if before.deterministic != after.deterministic:
        torch.set_deterministic_debug_mode(after.deterministic)
    if before.flush_denormal != after.flush_denormal:
        torch.set_flush_denormal(after.flush_denormal)
