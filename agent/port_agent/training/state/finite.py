"""Checks for losses or states that are NaN or infinite, with which training cannot continue."""

import math

import torch

from port_planner.base.errors import ExitCode, PortError

_REMEDY = (
    "the last good checkpoint is kept; lower the learning rate or clip gradients (clip_grad_norm of the job) and plan "
    "again, or set allow_nonfinite=True in the job to continue anyway"
)


class NonFiniteError(PortError):
    """The loss or the state became NaN or infinite."""

    exit_code = ExitCode.DIVERGED


def check_loss(loss: float, step: int) -> None:
    """Raise NonFiniteError if the loss of a step is not a finite number."""
    if not math.isfinite(loss):
        raise NonFiniteError(f"the loss of step {step} is {loss}; {_REMEDY}")


def check_state(key: str, contents: torch.Tensor, kind: torch.dtype) -> None:
    """Raise NonFiniteError if the bytes of a persistent storage are not all finite numbers.

    They are read as `kind`, at the speed of memory, without a copy. A sum of finite numbers is finite unless it
    overflows; computing it takes half the time of computing their range.
    """
    if not (kind.is_floating_point or kind.is_complex) or contents.numel() < kind.itemsize:
        return
    numbers = contents[: contents.numel() // kind.itemsize * kind.itemsize].view(kind)
    if kind.is_complex:
        numbers = torch.view_as_real(numbers)
    if math.isfinite(numbers.sum().item()):
        return
    least, most = torch.aminmax(numbers)
    if not (math.isfinite(least.item()) and math.isfinite(most.item())):
        raise NonFiniteError(f"{key} is no longer finite after the update ({least.item()} to {most.item()}); {_REMEDY}")
