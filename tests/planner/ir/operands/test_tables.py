"""Rows that are looked up."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from port_planner.capture.step import capture_step
from port_planner.ir.graph import GraphError, Op, Ref, StepGraph
from port_planner.ir.operands.verify import verify_operands
from port_planner.tiling.blocks import blocks_of, large_weights, read_in_blocks
from tests.planner.ir.operands.recorded_step import changed, place
from tests.planner.tiling.table_step import reader, reader_batch, reader_loss


def rows_in_blocks() -> StepGraph:
    """Return a step whose table of embeddings is trained in blocks of rows."""
    model = reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, reader_loss, optimizer, reader_batch(0)).graphs["step"]
    (weight,) = large_weights([graph], 100_000)
    return read_in_blocks(graph, {weight.name: blocks_of(weight, 4)}).graph


@pytest.mark.parametrize(
    ("clamp", "change"),
    [
        ("clamp_max", lambda op: replace(op, args=(op.args[0], op.args[1] + 1))),
        ("clamp_max", lambda op: replace(op, args=(op.args[0], -1))),
        ("clamp_max", lambda op: replace(op, args=(op.args[0], 1.5))),
        ("clamp_max", lambda op: replace(op, name="aten::clamp_min")),
        ("clamp_min", lambda op: replace(op, args=(op.args[0], -1))),
        ("clamp_min", lambda op: replace(op, name="aten::clamp_max")),
    ],
)
def test_rows_of_a_gradient_are_bounded_from_both_sides(clamp: str, change: Callable[[Op], Op]) -> None:
    graph = rows_in_blocks()
    verify_operands(graph)
    gradient = place(graph, "embedding_dense_backward")
    bound = max(i for i in range(gradient) if graph.ops[i].name == f"aten::{clamp}")
    ops = tuple(change(op) if i == bound else op for i, op in enumerate(graph.ops))
    with pytest.raises(GraphError, match="embedding_dense_backward"):
        verify_operands(replace(graph, ops=ops))


def test_rows_of_a_gradient_are_not_written_once_they_are_bounded() -> None:
    graph = rows_in_blocks()
    gradient = place(graph, "embedding_dense_backward")
    op = graph.ops[gradient]
    assert isinstance(op.args[1], Ref)
    index = op.args[1].value
    spoilt = Op("aten::zero_", (Ref(index),), (), (index,), (graph.values[index].storage,), op.phase)
    with pytest.raises(GraphError, match="embedding_dense_backward"):
        verify_operands(replace(graph, ops=(*graph.ops[:gradient], spoilt, *graph.ops[gradient:])))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda op: replace(op, args=(1, *op.args[1:])),
        lambda op: replace(op, args=(op.args[0], 1 << 20, op.args[2])),
        lambda op: replace(op, args=(*op.args[:2], 0)),
        lambda op: replace(op, name="aten::arange.start"),
    ],
    ids=["begins later", "ends behind the indices", "bags of nothing", "another operator"],
)
def test_bags_begin_where_rows_do(graph: StepGraph, change: Callable[[Op], Op]) -> None:
    with pytest.raises(GraphError, match="_embedding_bag"):
        verify_operands(changed(graph, "arange", change))
