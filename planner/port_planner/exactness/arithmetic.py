"""The settings of torch's arithmetic, which a program may change on its way: the same call then rounds otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_ONEDNN: Any = torch.backends.mkldnn
_KINDS = (_ONEDNN.matmul, _ONEDNN.conv, _ONEDNN.rnn)
"""Of operators whose float32 factors oneDNN may round."""


class Arithmetic(NamedTuple):
    """What chooses kernels on the CPU beside their operands."""

    threads: int
    onednn: bool
    precisions: tuple[str, ...]
    """Of `_KINDS`: "ieee", or what factors are rounded to."""


def arithmetic() -> Arithmetic:
    """Return the settings of this thread now."""
    return Arithmetic(torch.get_num_threads(), _ONEDNN.enabled, tuple(kind.fp32_precision for kind in _KINDS))


@contextmanager
def computing_as(then: Arithmetic) -> Iterator[None]:
    """Run the block with the settings of `then`."""
    now = arithmetic()
    _change(now, then)
    try:
        yield
    finally:
        _change(then, now)


def _change(before: Arithmetic, after: Arithmetic) -> None:
    if before.threads != after.threads:
        torch.set_num_threads(after.threads)
    if before.onednn != after.onednn:
        _ONEDNN.enabled = after.onednn
    for kind, old, new in zip(_KINDS, before.precisions, after.precisions, strict=True):
        if old != new:
            kind.fp32_precision = new
