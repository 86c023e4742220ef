"""Gradients of losses."""

import contextlib
from dataclasses import replace

import pytest

from port_planner.ir.graph import GraphError, Ref, StepGraph
from port_planner.ir.operands.verify import verify_operands
from tests.planner.ir.operands.recorded_step import changed, made_of, place


@pytest.mark.parametrize("name", ["multi_margin_loss_backward", "multilabel_margin_loss_backward"])
def test_a_gradient_of_no_element(graph: StepGraph, name: str) -> None:
    v = graph.ops[place(graph, name)].args[0]
    assert isinstance(v, Ref)
    none = replace(graph.values[v.value], shape=(0,), stride=(1,))
    wide = replace(graph, values=(*graph.values, none))
    with pytest.raises(GraphError, match=name):
        verify_operands(changed(wide, name, lambda op: replace(op, args=(Ref(len(graph.values)), *op.args[1:]))))


@pytest.mark.parametrize(
    ("one", "other", "grad", "fits"),
    [
        ((3, 5), (4, 5), (3, 4), True),
        ((2, 3, 5), (4, 5), (2, 3, 4), True),
        ((2, 1, 3, 5), (7, 4, 5), (2, 7, 3, 4), True),
        ((3, 5), (4, 6), (3, 4), False),
        ((3, 5), (4, 5), (4, 3), False),
        ((2, 3, 5), (3, 4, 5), (3, 3, 4), False),
        ((5,), (4, 5), (4,), False),
    ],
)
def test_distances_of_rows(one: tuple[int, ...], other: tuple[int, ...], grad: tuple[int, ...], fits: bool) -> None:
    graph = made_of("aten::_cdist_backward", (grad, one, other), (2.0,), grad)
    with contextlib.nullcontext() if fits else pytest.raises(GraphError, match="_cdist_backward"):
        verify_operands(graph)


@pytest.mark.parametrize(("rows", "pairs", "fits"), [(4, 6, True), (1, 0, True), (4, 5, False), (0, 0, False)])
def test_distances_of_pairs(rows: int, pairs: int, fits: bool) -> None:
    graph = made_of("aten::_pdist_backward", ((pairs,), (rows, 3)), (2.0,), (pairs,))
    with contextlib.nullcontext() if fits else pytest.raises(GraphError, match="_pdist_backward"):
        verify_operands(graph)
