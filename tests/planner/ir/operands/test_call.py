"""Indices that nobody checks are those that the forward pass made or took, or copies of them."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import capture_step
from port_planner.ir.devices.transfers import transfer_of
from port_planner.ir.graph import GraphError, Op, Ref, Role, StepGraph
from port_planner.ir.operands.verify import verify_operands
from port_planner.problem.placed_step import placed_step
from tests.planner.ir.operands.recorded_step import INDICES, changed, place


@pytest.mark.parametrize("name", INDICES)
def test_indices_from_elsewhere(graph: StepGraph, name: str) -> None:
    """A value of the same layout that comes with the batch or the file."""
    op = graph.ops[place(graph, name)]
    index = op.args[INDICES[name]]
    assert isinstance(index, Ref)
    value = replace(graph.values[index.value], storage=len(graph.storages))
    storages = (*graph.storages, replace(graph.storages[graph.values[index.value].storage], name="mine"))
    wide = replace(graph, storages=storages, values=(*graph.values, value))
    args = tuple(Ref(len(graph.values)) if i == INDICES[name] else a for i, a in enumerate(op.args))
    with pytest.raises(GraphError, match=name):
        verify_operands(changed(wide, name, lambda op: replace(op, args=args)))


@pytest.mark.parametrize("name", INDICES)
def test_indices_that_are_changed_after_they_were_checked(graph: StepGraph, name: str) -> None:
    i = place(graph, name)
    index = graph.ops[i].args[INDICES[name]]
    assert isinstance(index, Ref)
    fill = Op(
        "aten::fill_.Scalar",
        (index, 1 << 40),
        (),
        (index.value,),
        (graph.values[index.value].storage,),
        graph.ops[i].phase,
    )
    with pytest.raises(GraphError, match=name):
        verify_operands(replace(graph, ops=(*graph.ops[:i], fill, *graph.ops[i:])))


def with_copied_indices(graph: StepGraph, name: str) -> StepGraph:
    """Return the graph with a copy, made right before the call of `name`, in the place of its indices."""
    i = place(graph, name)
    op, index = graph.ops[i], graph.ops[i].args[INDICES[name]]
    assert isinstance(index, Ref)
    value = graph.values[index.value]
    dense = torch.empty_strided(value.shape, value.stride, device="meta").clone().stride()
    copied = replace(value, storage=len(graph.storages), stride=dense, offset=0)
    made = Op("aten::clone", (index,), (), (len(graph.values),), (), op.phase)
    args = tuple(Ref(len(graph.values)) if k == INDICES[name] else a for k, a in enumerate(op.args))
    storages = (*graph.storages, replace(graph.storages[value.storage], role=Role.TEMPORARY, name=""))
    ops = (*graph.ops[:i], made, replace(op, args=args), *graph.ops[i + 1 :])
    return replace(graph, ops=ops, storages=storages, values=(*graph.values, copied))


@pytest.mark.parametrize("name", INDICES)
def test_copies_of_indices_that_were_checked(graph: StepGraph, name: str) -> None:
    verify_operands(with_copied_indices(graph, name))


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("copy", [True, False])
def test_copies_that_are_changed_or_made_of_what_was_changed(graph: StepGraph, name: str, copy: bool) -> None:
    copied = with_copied_indices(graph, name)
    i = place(copied, name)
    at = i if copy else i - 1  # after the copy was made, or before
    written = copied.ops[i].args[INDICES[name]] if copy else copied.ops[i - 1].args[0]
    assert isinstance(written, Ref)
    storage = copied.values[written.value].storage
    fill = Op("aten::fill_.Scalar", (written, 1 << 40), (), (written.value,), (storage,), copied.ops[i].phase)
    with pytest.raises(GraphError, match=name):
        verify_operands(replace(copied, ops=(*copied.ops[:at], fill, *copied.ops[at:])))


@pytest.mark.parametrize("name", INDICES)
def test_a_copy_that_is_made_after_it_is_read(graph: StepGraph, name: str) -> None:
    copied = with_copied_indices(graph, name)
    i = place(copied, name)
    with pytest.raises(GraphError, match=name):
        verify_operands(copied.reordered((*range(i - 1), i, i - 1, *range(i + 1, len(copied.ops)))))


def test_indices_may_come_over_from_another_device_as_they_are_and_not_changed_on_the_way() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 4))
    batch = torch.randn(2, 1, 8, 8), torch.tensor([1, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = capture_step(model, lambda m, x, y: functional.cross_entropy(m(x), y), optimizer, batch).graphs["step"]
    pooled = next(i for i, op in enumerate(recorded.ops) if op.name == "aten::max_pool2d_with_indices")
    kinds = ["sim" if i == pooled else "cpu" for i in range(len(recorded.ops))]
    there = placed_step(recorded, kinds).graph
    verify_operands(there)
    back = [
        i
        for i, op in enumerate(there.ops)
        if (t := transfer_of(there, op)) and there.storages[t.target].device == "cpu"
    ]
    changed = [replace(op, name="aten::bitwise_not", kwargs=()) if i in back else op for i, op in enumerate(there.ops)]
    with pytest.raises(GraphError, match="max_pool2d_with_indices_backward"):
        verify_operands(replace(there, ops=tuple(changed)))
