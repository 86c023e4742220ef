"""The rules of a graph, and the names it gives a reader."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.ir.graph import GraphError, Op, Phase, Ref, Role, StepGraph, operands, verify_graph, with_operands
from tests.planner.small_classifier import batch, classify, net, sgd


def test_values_are_replaced_wherever_an_argument_holds_them() -> None:
    op = Op("aten::add.Tensor", (Ref(1), (Ref(2), 5), None), (("alpha", Ref(1)),), (3,), (), Phase.FORWARD)
    other = with_operands(op, {1: 7, 2: 8}.__getitem__)
    assert other == replace(op, args=(Ref(7), (Ref(8), 5), None), kwargs=(("alpha", Ref(7)),))
    assert list(operands(other)) == [7, 8, 7]


def test_graphs_that_break_their_rules_are_refused() -> None:
    model = net()
    graph = capture_step(model, classify, sgd(model), batch()).graphs["step"]
    ops = graph.ops
    wrong = {
        "before any op creates it": replace(graph, ops=ops[1:]),
        "does not exist": replace(graph, loss=len(graph.values)),
        "not among its operands": replace(graph, ops=(replace(ops[0], writes=(len(graph.storages) - 1,)), *ops[1:])),
        "which is a constant": replace(
            graph,
            storages=tuple(replace(s, role=Role.CONSTANT) if s.role is Role.BUFFER else s for s in graph.storages),
        ),
        "reaches byte": replace(graph, storages=tuple(replace(s, nbytes=1) for s in graph.storages)),
        "claims": replace(graph, storages=tuple(replace(s, nbytes=1 << 50) for s in graph.storages)),
        "which is not a kind of device": replace(
            graph, storages=(replace(graph.storages[0], device="a b"), *graph.storages[1:])
        ),
        "cuda and mps": replace(
            graph,
            storages=(
                replace(graph.storages[0], device="cuda"),
                replace(graph.storages[1], device="mps"),
                *graph.storages[2:],
            ),
        ),
        "every random op once": replace(graph, draws=((0,),)),
        "cannot draw in another order": replace(
            graph,
            ops=(
                replace(ops[0], name="aten::multinomial", random=True),
                *(replace(op, random=False) for op in ops[1:]),
            ),
            draws=((0,),),
        ),
        "dtype": replace(graph, values=tuple(replace(v, dtype="quaternion") for v in graph.values)),
    }
    for message, broken in wrong.items():
        with pytest.raises(GraphError, match=message):
            verify_graph(broken)


def test_what_stays_with_the_cpu_takes_nothing_of_the_devices_memory() -> None:
    model = net()
    graph = capture_step(model, classify, sgd(model), batch()).graphs["step"]
    assert graph.device == "cpu" and graph.sizes == tuple(s.nbytes for s in graph.storages)
    first, *rest = graph.storages
    moved = replace(graph, storages=(first, *(replace(s, device="cuda") for s in rest)))
    assert moved.device == "cuda" and moved.sizes == (0, *(s.nbytes for s in rest))


def test_labels_name_what_a_reader_knows() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, lambda m, x: m(x).sum(), optimizer, (torch.ones(2, 4),)).graphs["step"]
    labels = {graph.label(s) for s, uses in enumerate(graph.uses) if uses}
    assert {"0.weight", "relu output [2, 3]"} <= labels
    assert not any(label.startswith("storage") for label in labels)


def test_operators_are_known_by_the_module_whose_weights_they_take() -> None:
    model = net()
    graph = capture_step(model, classify, sgd(model), batch()).graphs["step"]
    known = {graph.operator_of_module(i) for i, op in enumerate(graph.ops) if op.phase is Phase.FORWARD}
    assert {"addmm of 0", "native_batch_norm of 1", "relu", "addmm of 4"} <= known
    assert {graph.module_of(i) for i in range(len(graph.ops))} == {"", "0", "1", "4"}


def test_what_was_found_in_a_graph_and_its_orders_are_kept_with_it() -> None:
    graph = capture_step(net(), classify, sgd(net()), batch()).graphs["step"]
    asked: list[int] = []

    def count(graph: StepGraph) -> int:
        asked.append(len(graph.ops))
        return len(asked)

    assert [graph.once(count), graph.once(count)] == [1, 1] and len(asked) == 1
    assert replace(graph).once(count) == 2, "another graph"
    order = tuple(reversed(range(len(graph.ops))))
    assert graph.reordered(order) is graph.reordered(order)
    assert graph.reordered(order).ops == graph.ops[::-1] != graph.reordered(tuple(range(len(graph.ops)))).ops
