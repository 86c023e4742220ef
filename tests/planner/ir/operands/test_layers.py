"""Normalizations and attention."""

from dataclasses import replace
from functools import partial
from typing import Any

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


@pytest.mark.parametrize(("moving", "rows"), [(True, 0), (False, 0), (True, 4)])
def test_a_quantizer_has_one_number_of_each_kind(moving: bool, rows: int) -> None:
    """Its kernel reads the first number of a tensor, or one for each row, whether there is one or not."""
    model: Any = nn.Linear(4, 4)
    model.register_buffer("lowest", torch.zeros((rows,) * bool(rows)))
    model.register_buffer("highest", torch.ones((rows,) * bool(rows)))
    model.register_buffer("scale", torch.ones(rows or 1))
    model.register_buffer("zero", torch.zeros(rows or 1, dtype=torch.int32))
    on = torch.ones(1, dtype=torch.uint8)

    def loss(model: Any, x: torch.Tensor) -> Any:
        y, scale, zero = model(x), model.scale, model.zero
        if not moving:
            return torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
                y, scale, zero, torch.ones(1, dtype=torch.int64), 0, 255
            )[0].sum()
        return torch.fused_moving_avg_obs_fake_quant(
            y, on, on, model.lowest, model.highest, scale, zero, 0.01, 0, 255, 0, rows > 0, False
        ).sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, loss, optimizer, (torch.randn(rows or 2, 4),)).graphs["step"]
    verify_operands(graph)
    name = "_fused_moving_avg_obs_fq_helper" if moving else "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
    op = graph.ops[place(graph, name)]
    for i, argument in enumerate(op.args[1:], 1):
        if isinstance(argument, Ref):
            empty = replace(
                graph, values=(*graph.values, replace(graph.values[argument.value], shape=(0,), stride=(1,)))
            )
            args = tuple(Ref(len(graph.values)) if k == i else a for k, a in enumerate(op.args))
            with pytest.raises(GraphError, match=name):
                verify_operands(changed(empty, name, partial(replace, args=args)))
    with pytest.raises(GraphError, match=name):
        other = (*op.args[:11], not rows) if moving else (*op.args[:3], op.args[0], *op.args[4:])
        verify_operands(changed(graph, name, partial(replace, args=other)))
