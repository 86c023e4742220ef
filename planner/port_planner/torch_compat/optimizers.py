"""Optimizers: hooks on their steps, and their own bookkeeping."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from port_planner.torch_compat.parts import require, uses


def _hooks_are_seen() -> None:
    optimizer = _optimizer(SGD)
    hooks: list[Any] = [print, repr]
    optimizer.register_step_pre_hook(hooks[0])
    optimizer.register_step_post_hook(hooks[1])
    require(
        [*hooks_before_steps(optimizer), *hooks_after_steps(optimizer)] == hooks, "hooks on steps are kept elsewhere"
    )
    drop_step_hooks(optimizer)
    require(not hooks_after_steps(optimizer), "hooks on steps are dropped otherwise")


@uses("torch.optim.Optimizer's hooks", "a bundle silently lacks hooks that change what is trained", _hooks_are_seen)
def hooks_before_steps(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks before the steps of this optimizer."""
    return [*optimizer._optimizer_step_pre_hooks.values()]


def hooks_after_steps(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks after the steps of this optimizer, in the order in which they run."""
    return [*optimizer._optimizer_step_post_hooks.values()]


def drop_step_hooks(optimizer: Optimizer) -> None:
    """Remove the step hooks of an optimizer's copy."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


@uses("torch.optim.optimizer._global_optimizer_pre_hooks", "a bundle silently lacks hooks that change what is trained")
def all_step_hooks() -> list[Callable[..., Any]]:
    """Return the hooks on the steps of all optimizers."""
    return [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]


def _marks_are_as_known() -> None:
    optimizer = _optimizer(SGD)
    StepLR(optimizer, 1)
    require(is_scheduled_step(optimizer.step), "a scheduler marks its optimizer's step otherwise")
    optimizer.step()
    require(hasattr(optimizer, "_opt_called"), "an optimizer notes otherwise that it made a step")
    fused = hasattr(_optimizer(SGD, fused=True), "_need_device_dtype_check_for_fused")
    require(fused, "a fused optimizer looks at the device otherwise")


@uses("_wrapped_by_lr_sched, _opt_called, _need_device_dtype_check_for_fused", "steps are refused", _marks_are_as_known)
def is_scheduled_step(step: object) -> bool:
    """Return whether an optimizer's step() is that of its class, in the wrapper that a scheduler puts around it."""
    return hasattr(step, "_wrapped_by_lr_sched")


def note_step(optimizer: Optimizer) -> None:
    """Make a scheduler notice that the optimizer has made a step; otherwise it warns."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def skip_fused_check(optimizer: Optimizer) -> None:
    """Make a fused optimizer skip its device check, which rejects the meta device."""
    optimizer._need_device_dtype_check_for_fused = False  # type: ignore[attr-defined]


def _state_can_be_taken() -> None:
    optimizer = _optimizer(AdamW)
    take_state(optimizer, optimizer.param_groups[0], *([] for _ in range(6)))


@uses("torch.optim.AdamW._init_group", "fine-tuning cannot update one weight at a time", _state_can_be_taken)
def take_state(optimizer: Optimizer, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
    """Fill the lists that `torch.optim.adam.adam` takes, creating missing state; return whether any is complex."""
    return bool(optimizer._init_group(group, *lists))  # type: ignore[attr-defined]


def _optimizer(kind: Callable[..., Optimizer], **options: Any) -> Optimizer:
    return kind([torch.zeros(1, requires_grad=True)], **options)
