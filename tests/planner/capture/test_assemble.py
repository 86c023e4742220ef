"""What a recorded tape becomes: updates as early as they may be, nothing dead, everything numbered from zero."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.ir.graph import Phase, Role, StepGraph, references
from tests.planner.small_classifier import batch, classify, net, sgd


def step_of(
    loss: Callable[..., torch.Tensor] = classify, *, clip_grad_norm: float | None = None, **options: Any
) -> StepGraph:
    """Return the graph of a step of the small classifier."""
    model = net()
    return capture_step(model, loss, sgd(model, **options), batch(), clip_grad_norm=clip_grad_norm).graphs["step"]


def first_update(graph: StepGraph) -> int:
    """Return the first op that changes a parameter."""
    return next(i for i, op in enumerate(graph.ops) if any(graph.storages[s].role is Role.PARAMETER for s in op.writes))


def last_backward(graph: StepGraph) -> int:
    """Return the last op of the backward pass."""
    return max(i for i, op in enumerate(graph.ops) if op.phase is Phase.BACKWARD)


@pytest.mark.slow
def test_the_last_layer_is_updated_before_the_first_ones_gradient_is_made() -> None:
    graph = step_of(momentum=0.9)
    assert first_update(graph) < last_backward(graph)


def test_clipping_holds_every_update_back_until_all_gradients_are_there() -> None:
    graph = step_of(clip_grad_norm=1.0)
    assert first_update(graph) > last_backward(graph)


def test_what_nobody_reads_is_not_computed() -> None:
    def with_waste(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (x * 3).cosh().sum()
        return classify(model, x, y)

    assert [op.name for op in step_of(with_waste).ops] == [op.name for op in step_of().ops]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_values_are_numbered_without_holes(momentum: float) -> None:
    graph = step_of(momentum=momentum)
    read = {v for op in graph.ops for argument in (*op.args, *dict(op.kwargs).values()) for v in references(argument)}
    made = {v for op in graph.ops for v in op.outputs if v is not None}
    assert read | made | {graph.loss, *graph.batch} <= set(range(len(graph.values)))
    assert {value.storage for value in graph.values} == set(range(len(graph.storages)))


def test_a_constant_that_is_changed_is_copied_first_and_one_that_is_not_is_read_where_it_lies() -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        factors, shift = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor(0.5)
        factors[1:].mul_(2)
        return classify(lambda x: model(x) * factors + shift, x, y)  # type: ignore[arg-type]

    graph = step_of(loss)
    constants = [s for s, storage in enumerate(graph.storages) if storage.role is Role.CONSTANT]
    readers = {s: [graph.ops[i].name for i in graph.uses[s]] for s in constants}
    assert sorted(graph.storages[s].nbytes for s in constants) == [4, 16]
    assert {graph.storages[s].nbytes: names for s, names in readers.items()} == {
        16: ["aten::clone"],
        4: ["aten::add.Tensor"],
    }
    assert not {s for op in graph.ops for s in op.writes} & {*constants}
