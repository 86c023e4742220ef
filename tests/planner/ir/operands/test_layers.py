"""Normalizations and attention."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import capture_step
from port_planner.ir.graph import GraphError, Ref, StepGraph
from port_planner.ir.operands.verify import verify_operands
from tests.planner.ir.operands.recorded_step import changed, place


def test_heads_that_share_keys_fit() -> None:
    """As in Llama: fewer heads of keys and values than of queries."""
    model = nn.Linear(8, 8)

    def attend(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q = model(x)
        return functional.scaled_dot_product_attention(q, q[:, :2], q[:, 2:], enable_gqa=True).sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, attend, optimizer, (torch.randn(2, 4, 5, 8),)).graphs["step"]
    verify_operands(graph)
    assert any("flash_attention_for_cpu_backward" in op.name for op in graph.ops)


def test_statistics_for_other_channels(graph: StepGraph) -> None:
    op = graph.ops[place(graph, "native_batch_norm")]
    weight = op.args[1]
    assert isinstance(weight, Ref)
    short = replace(graph.values[weight.value], shape=(1,))
    wide = replace(graph, values=(*graph.values, short))
    for i in (1, 2, 3, 4):
        args = tuple(Ref(len(graph.values)) if k == i else a for k, a in enumerate(op.args))
        with pytest.raises(GraphError, match="native_batch_norm"):
            verify_operands(changed(wide, "native_batch_norm", partial(replace, args=args)))
