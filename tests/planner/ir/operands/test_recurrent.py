"""oneDNN's recurrent layers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.ir.graph import Argument, GraphError, Ref, StepGraph
from port_planner.ir.operands.verify import verify_operands
from tests.planner.ir.operands.recorded_step import changed, place


@pytest.fixture(
    scope="module",
    params=[(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)],
    ids=["biases", "no biases", "bfloat16"],
)
def recurrent(request: pytest.FixtureRequest) -> StepGraph:
    biases, kind = request.param
    if kind is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no kernel of oneDNN for recurrent layers in bfloat16; PyTorch takes them apart")
    model = nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True, bias=biases, dtype=kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(3, 4, 5).to(kind),)
    return capture_step(model, lambda model, x: model(x)[0].square().mean(), optimizer, batch).graphs["step"]


LSTM_OPERANDS = [("mkldnn_rnn_layer", i) for i in range(7)] + [
    ("mkldnn_rnn_layer_backward", i) for i in (*range(11), 22)
]


def test_recorded_lstms_fit(recurrent: StepGraph) -> None:
    verify_operands(recurrent)
    names = [op.name for op in recurrent.ops]
    assert names.count("aten::mkldnn_rnn_layer") == names.count("aten::mkldnn_rnn_layer_backward") == 4


@pytest.mark.parametrize(("name", "operand"), LSTM_OPERANDS)
@pytest.mark.parametrize("change", ["shape", "dtype", "stride", "storage"])
def test_operands_that_do_not_fit_an_lstm(recurrent: StepGraph, name: str, operand: int, change: str) -> None:
    argument = recurrent.ops[place(recurrent, name)].args[operand]
    assert isinstance(argument, Ref)
    value = recurrent.values[argument.value]
    changes: dict[str, dict[str, Any]] = {
        "shape": {"shape": (*value.shape[:-1], value.shape[-1] + 1)},
        "dtype": {"dtype": "bfloat16" if value.dtype == "float32" else "float32"},
        "stride": {"stride": (*value.stride[:-1], 2)},
        "storage": {"storage": 0},
    }
    gradient, workspace = operand == 10, operand == 22
    if (change == "stride" and gradient) or (change == "storage" and not workspace):
        return  # a gradient may lie anyhow, and only a workspace must be the one that was made
    wide = replace(recurrent, values=(*recurrent.values, replace(value, **changes[change])))
    args = (*recurrent.ops[place(recurrent, name)].args,)
    other = (*args[:operand], Ref(len(recurrent.values)), *args[operand + 1 :])
    with pytest.raises(GraphError, match=name):
        verify_operands(changed(wide, name, lambda op: replace(op, args=other)))


@pytest.mark.parametrize(
    ("operand", "forged"), [(7, 1), (8, (2, 1)), (9, 3), (10, 7), (10, 0), (11, 0), (11, 1 << 40), (12, None), (15, 1)]
)
def test_numbers_that_do_not_fit_an_lstm(recurrent: StepGraph, operand: int, forged: Argument) -> None:
    args = recurrent.ops[place(recurrent, "mkldnn_rnn_layer")].args
    other = (*args[:operand], forged, *args[operand + 1 :])
    with pytest.raises(GraphError, match="mkldnn_rnn_layer"):
        verify_operands(changed(recurrent, "mkldnn_rnn_layer", lambda op: replace(op, args=other)))


@pytest.mark.parametrize("operand", [13, 16, 17, 18, 20, 21])  # reverse, sizes, flags of the forward pass
def test_a_backward_pass_of_another_lstm(recurrent: StepGraph, operand: int) -> None:
    name = "mkldnn_rnn_layer_backward"
    args = recurrent.ops[place(recurrent, name)].args
    was = args[operand]
    values: dict[int, Argument] = {13: not was, 16: 3, 17: not was, 18: False, 20: (1,), 21: not was}
    other = (*args[:operand], values[operand], *args[operand + 1 :])
    with pytest.raises(GraphError, match=name):
        verify_operands(changed(recurrent, name, lambda op: replace(op, args=other)))
