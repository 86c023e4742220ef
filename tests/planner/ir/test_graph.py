"""The rules of a graph, and the names it gives a reader."""

import pytest
import torch
from torch import nn

from planner.capture.step import capture_step
from planner.ir.graph import GraphError, verify_graph
from tests.planner.small_classifier import batch, classify, net, sgd


def test_graphs_that_break_their_rules_are_refused() -> None:
    from dataclasses import replace

    model = net()
    graph = capture_step(model, classify, sgd(model), batch()).graphs["step"]
    ops = graph.ops
    wrong = {
        "before any op creates it": replace(graph, ops=ops[1:]),
        "does not exist": replace(graph, loss=len(graph.values)),
        "not among its operands": replace(graph, ops=(replace(ops[0], writes=(len(graph.storages) - 1,)), *ops[1:])),
        "reaches byte": replace(graph, storages=tuple(replace(s, nbytes=1) for s in graph.storages)),
        "claims": replace(graph, storages=tuple(replace(s, nbytes=1 << 50) for s in graph.storages)),
        "dtype": replace(graph, values=tuple(replace(v, dtype="quaternion") for v in graph.values)),
    }
    for message, broken in wrong.items():
        with pytest.raises(GraphError, match=message):
            verify_graph(broken)


def test_labels_name_what_a_reader_knows() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, lambda m, x: m(x).sum(), optimizer, (torch.ones(2, 4),)).graphs["step"]
    labels = {graph.label(s) for s, uses in enumerate(graph.uses) if uses}
    assert {"0.weight", "relu output [2, 3]"} <= labels
    assert not any(label.startswith("storage") for label in labels)
