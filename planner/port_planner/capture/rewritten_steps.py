"""Steps of torch's optimizers that read numbers from tensors in Python (`.item()`), rewritten without these reads.

Adafactor scales each update by norms of the weight and of the update itself, and ASGD by a rate that it keeps in a
tensor. The results are those of torch 2.13, to the bit: operators on double tensors with one element compute what
Python computes in double precision from a tensor's number. Values that depend only on the number of steps stay numbers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from port_planner.base.errors import CaptureError
from port_planner.capture.recorder import StepRecorder

RewrittenStep = Callable[[torch.optim.Optimizer, StepRecorder], None]
"""Performs a step of an optimizer over tensors without contents while they are recorded."""


def rewritten_step(optimizer: torch.optim.Optimizer) -> RewrittenStep | None:
    """Return the function that replaces the `step` of an optimizer's class; None to use its own."""
    return _REWRITTEN.get(type(optimizer))


@torch.no_grad()
def _adafactor(optimizer: torch.optim.Optimizer, recorder: StepRecorder) -> None:
    for group in optimizer.param_groups:
        _require_plain(optimizer, group)
        for parameter in (p for p in group["params"] if p.grad is not None):
            state = optimizer.state[parameter]
            if not state:
                state |= {"step": 0, **_second_moments(parameter)}
            state["step"] += 1
            _update_by_adafactor(parameter, state, group, recorder)


def _second_moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if parameter.dim() < 2:
        return {"variance": torch.zeros_like(parameter, memory_format=torch.preserve_format)}
    rows, columns = [*parameter.shape], [*parameter.shape]
    rows[-1] = columns[-2] = 1
    return {"row_var": parameter.new_zeros(rows), "col_var": parameter.new_zeros(columns)}


def _update_by_adafactor(
    parameter: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any], recorder: StepRecorder
) -> None:
    step, lr, d = float(state["step"]), group["lr"], group["d"]
    eps1, eps2 = group["eps"]
    eps1 = torch.finfo(parameter.dtype).eps if eps1 is None else eps1
    gradient = _gradient(parameter, group)
    decay = step ** group["beta2_decay"]
    root = math.sqrt(parameter.numel())
    alpha = _at_least(eps2, parameter.norm(2).double() / root) * min(lr, 1 / step**0.5)
    if group["weight_decay"] != 0:
        parameter.mul_(1 - lr * group["weight_decay"])
    if gradient.dim() > 1:
        row_var, col_var = state["row_var"], state["col_var"]
        row_var.lerp_(torch.norm(gradient, dim=-1, keepdim=True).square_().div_(gradient.size(-1)), decay)
        col_var.lerp_(torch.norm(gradient, dim=-2, keepdim=True).square_().div_(gradient.size(-2)), decay)
        estimate = row_var @ col_var
        estimate.div_(row_var.mean(dim=-2, keepdim=True).clamp_(min=eps1))
    else:
        state["variance"].lerp_(gradient * gradient, decay)
        estimate = state["variance"].clone()
    update = estimate.clamp_(min=eps1 * eps1).rsqrt_()
    update.mul_(gradient)
    divisor = _at_least(1.0, update.norm(2).double() / (root * d))
    recorder.add_scaled(parameter, update, -alpha / divisor)


def _at_least(least: float, number: torch.Tensor) -> torch.Tensor:
    """Return what `max(least, number)` gives in Python, which is `least` for NaN."""
    return number.masked_fill((number > least).logical_not(), least)


@torch.no_grad()
def _asgd(optimizer: torch.optim.Optimizer, recorder: StepRecorder) -> None:
    for group in optimizer.param_groups:
        _require_plain(optimizer, group)
        lr, lambd = group["lr"], group["lambd"]
        for parameter in (p for p in group["params"] if p.grad is not None):
            state = optimizer.state[parameter]
            if not state:
                average = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state |= {"step": 0, "eta": _stored(lr), "mu": 1.0, "ax": average}
            state["step"] += 1
            gradient, eta, average = _gradient(parameter, group), state["eta"], state["ax"]
            if group["weight_decay"] != 0:
                gradient = gradient.add(parameter, alpha=group["weight_decay"])
            parameter.mul_(1 - lambd * eta)
            parameter.add_(gradient, alpha=-eta)
            if state["mu"] != 1:
                average.add_(parameter.sub(average).mul_(state["mu"]))
            else:
                average.copy_(parameter)
            state["eta"] = _stored(lr / ((1 + lambd * lr * state["step"]) ** group["alpha"]))
            state["mu"] = _stored(1 / max(1, state["step"] - group["t0"]))


def _gradient(parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    gradient: torch.Tensor = parameter.grad  # type: ignore[assignment]  # those without are left out
    return -gradient if group["maximize"] else gradient


def _stored(number: float) -> float:
    """Return a number rounded to torch's default precision."""
    return number if torch.get_default_dtype() is torch.float64 else float(np.float32(number))


def _require_plain(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    for flag in ("foreach", "capturable", "differentiable"):
        if group.get(flag):
            raise CaptureError(
                f"the optimizer {type(optimizer).__name__} was made with {flag}=True, which gives different numbers "
                f"from the plain update; make it with {flag}=False, or train with `port-agent exec`"
            )
    if isinstance(group["lr"], torch.Tensor):
        raise CaptureError(
            f"the optimizer {type(optimizer).__name__} has a tensor for its learning rate, which is rounded "
            "differently from a number: give a number, or train with `port-agent exec`"
        )
    if any(p.is_complex() for p in group["params"]):
        raise CaptureError(
            f"the optimizer {type(optimizer).__name__} trains complex weights; train with `port-agent exec`"
        )


_REWRITTEN: dict[type[torch.optim.Optimizer], RewrittenStep] = {
    torch.optim.Adafactor: _adafactor,
    torch.optim.ASGD: _asgd,
}
