"""What only chooses elements is read off torch: windows of the data and sets of channels run, all else is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import McuCompileError, OpKind, Shape
from port_planner.mcu.quantize import float_op
from port_planner.mcu.selections import choosing_ops, identity_layer, read_choice
from port_planner.mcu.torch_axes import GRAPH_AXES, TorchAxes
from tests.planner.mcu.networks import choices

Call = Callable[[torch.Tensor], torch.Tensor]
EXTENTS = (4, 6, 5)

WINDOWS: list[Call] = [
    lambda x: x[:, :, 1:-2, 2:],
    lambda x: x[:, :, ::2, 1::3],
    lambda x: x[:, 1],
    lambda x: x[:, 3:, 2],
    lambda x: x[..., -1].narrow(2, 0, 4),
    lambda x: x[:, [3, 0, 0]].flip(1),
    lambda x: x.roll(1, 1)[:, :, :, 4:],
    lambda x: x.repeat(1, 2, 1, 1),
    lambda x: x.split([1, 3], 1)[1].unbind(2)[5],
    lambda x: x[:, :, None, 1:],
    lambda x: F.pad(x, (2, 0, 1, 3)),
    lambda x: F.pad(x, (-1, 2, 7, 0, 1, 0)),
    lambda x: F.pad(x[:, :, 2:], (0, 0, 0, 1))[:, :, 1:],
    lambda x: F.channel_shuffle(x, 2),
    lambda x: x.transpose(1, 2)[:, :4],
    lambda x: x,
]
OTHERS: list[Call] = [
    lambda x: x.flip(3),
    lambda x: x.repeat(1, 1, 1, 2),
    lambda x: x.roll(1, 2),
    lambda x: F.pad(x, (1, 1, 1, 1), value=1.0),
    lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    lambda x: x[:, :, [0, 1, 3]],
    lambda x: x[:1],
    lambda x: x[0],
    lambda x: x.flip(0),
    lambda x: x.triu(),
    lambda x: x.flatten(1)[:, :7],
    lambda x: x * 0,
    lambda x: F.pixel_unshuffle(x[:, :, :, :4], 2),
]


@pytest.mark.parametrize("call", WINDOWS)
def test_windows_and_channels_run_as_convolutions(call: Call) -> None:
    data = torch.randn(2, *EXTENTS, generator=torch.Generator().manual_seed(1))
    seen = TorchAxes.of(Shape(6, 5, 4), GRAPH_AXES)
    choice = read_choice(call, EXTENTS)
    assert choice is not None
    chosen = choosing_ops(choice, "x", seen)
    assert chosen is not None
    tensor = data
    for op in chosen[0]:
        assert op.fixed and op.kind in (OpKind.CONV, OpKind.DEPTHWISE)
        tensor = float_op(op, [tensor])
    torch.testing.assert_close(chosen[1].as_torch(tensor), call(data), rtol=0, atol=0)


@pytest.mark.parametrize("call", OTHERS)
def test_what_is_no_window_is_none(call: Call) -> None:
    choice = read_choice(call, EXTENTS)
    assert choice is None or choosing_ops(choice, "x", TorchAxes.of(Shape(6, 5, 4), GRAPH_AXES)) is None


def test_channels_of_a_flattened_tensor_are_not_chosen() -> None:
    choice = read_choice(lambda x: x[:, :7], (120,))
    assert choice is not None and choosing_ops(choice, "x", TorchAxes.of(Shape(6, 5, 4), ("CHW",))) is None


@pytest.mark.parametrize("axes", ["CHW", "HWC", "WCH"])
def test_the_identity_gives_values_in_the_order_of_torch(axes: str) -> None:
    seen = TorchAxes.of(Shape(2, 3, 4), (axes,))
    data = torch.randn(5, 4, 2, 3)
    torch.testing.assert_close(float_op(identity_layer("x", seen), [data]).flatten(1), seen.as_torch(data))


def test_nothing_of_a_choice_is_trained() -> None:
    module, data = choices()
    graph = import_module(module, data.shape[1:], samples=torch.from_numpy(data))
    assert [op.name for op in graph.weighted()] == ["stem", "narrow", "head"]
    assert graph.ops[-1].fixed and graph.notes == ("trained by the module, but not on a board: slope.weight",)


class ByTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x[:, x[0].argsort()])
        return logits


def test_a_choice_by_values_is_refused() -> None:
    with pytest.raises(
        McuCompileError, match=r"getitem: (indexes with a tensor|what it takes of \[8\] is not a window)|argsort"
    ):
        import_module(ByTensor(), (8,))
