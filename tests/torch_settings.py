"""Torch's settings of the process are the same at the beginning of every file of tests, whichever
files its worker ran before.
"""

import sys
from collections.abc import Callable

import pytest

_restore: list[Callable[[], None]] = []


def remember_torch_settings() -> None:
    """Remember them before a file's first test, where torch is loaded."""
    if "torch" not in sys.modules or _restore:
        return
    import torch

    from port_planner.exactness.applied_arithmetic import set_arithmetic
    from port_planner.ir.torch_arithmetic import arithmetic

    settings, dtype, gradients = arithmetic(), torch.get_default_dtype(), torch.is_grad_enabled()

    def restore() -> None:
        set_arithmetic(settings)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)

    _restore.append(restore)


def restore_torch_settings(item: pytest.Item, following: pytest.Item | None) -> None:
    """Put them back after a file's last test, and fail that where the file took from all others
    that they can be changed.
    """
    if following is not None and following.path == item.path:
        return
    if "torch" in sys.modules:
        import torch

        if torch.backends.flags_frozen():
            pytest.fail(
                "a test of this file had torch forbid changes to its settings (disable_global_flags)", pytrace=False
            )
    while _restore:
        _restore.pop()()
