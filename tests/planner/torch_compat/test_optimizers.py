"""Hooks on steps, a scheduler's mark, and state that is made for one weight."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from port_planner.torch_compat.optimizers import (
    all_step_hooks,
    drop_step_hooks,
    hooks_after_steps,
    hooks_before_steps,
    is_scheduled_step,
    note_step,
    skip_fused_check,
    take_state,
)


@pytest.fixture
def optimizer() -> Iterator[torch.optim.AdamW]:
    yield torch.optim.AdamW([torch.ones(2, requires_grad=True)])


def test_hooks_of_one_and_of_all_are_listed(optimizer: torch.optim.AdamW) -> None:
    def hook(*_: object) -> None:
        """Do nothing."""

    optimizer.register_step_post_hook(hook)
    before = len(all_step_hooks())
    handles = register_optimizer_step_pre_hook(hook), register_optimizer_step_post_hook(hook)
    assert hooks_after_steps(optimizer) == [hook] and len(all_step_hooks()) == before + 2
    assert not hooks_before_steps(optimizer)
    drop_step_hooks(optimizer)
    assert not hooks_after_steps(optimizer)
    for handle in handles:
        handle.remove()
    assert len(all_step_hooks()) == before


def test_a_scheduler_marks_the_step_and_believes_a_note(optimizer: torch.optim.AdamW) -> None:
    assert not is_scheduled_step(optimizer.step)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert is_scheduled_step(optimizer.step)
    note_step(optimizer)
    with warnings.catch_warnings(action="error"):
        scheduler.step()


def test_state_is_made_for_one_weight(optimizer: torch.optim.AdamW) -> None:
    (group,) = optimizer.param_groups
    group["params"][0].grad = torch.ones(2)
    lists: tuple[list[torch.Tensor], ...] = tuple([] for _ in range(6))
    assert take_state(optimizer, group, *lists) is False
    assert [len(one) for one in lists] == [1, 1, 1, 1, 0, 1]


def test_a_fused_update_is_recorded_on_tensors_without_memory() -> None:
    weight = torch.empty(2, device="meta", requires_grad=True)
    weight.grad = torch.empty(2, device="meta")
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    optimizer.step()
    skip_fused_check(optimizer)
    optimizer.param_groups[0]["fused"] = True
    with pytest.raises(NotImplementedError, match="_fused_sgd_"):  # which a recorder takes before it gets there
        optimizer.step()
