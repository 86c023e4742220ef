"""Numbers that training cannot go on with: a loss or a state that is NaN or infinite."""

import math

import torch

from port_planner.base.errors import ExitCode, PortError

_REMEDY = (
    "the last good checkpoint is kept; lower the learning rate or clip gradients (clip_grad_norm of the job) and plan again, "
    "or set allow_nonfinite=True in the job to go on all the same"
)


class NonFiniteError(PortError):
    """The loss or the state became NaN or infinite."""

    exit_code = ExitCode.DIVERGED


def check_loss(loss: float, step: int) -> None:
    """Raise NonFiniteError where the loss of a step is no finite number."""
    if not math.isfinite(loss):
        raise NonFiniteError(f"the loss of step {step} is {loss}; {_REMEDY}")


def check_state(key: str, contents: torch.Tensor, kind: torch.dtype) -> None:
    """Raise NonFiniteError where the bytes of a persistent storage are not all finite numbers.

    Read as `kind`, at the speed of memory, without a copy: a sum of finite numbers is finite, which takes half of the time that looking for
    their range does, or has overflowed.
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
