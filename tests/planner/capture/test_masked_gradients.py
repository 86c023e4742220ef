"""A convolution with frozen weights keeps no activation for the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.masked_gradients import BACKWARD, INPUT, MASK, is_plain
from port_planner.capture.step import capture_step
from port_planner.ir.graph import Phase, Ref, Role, StepGraph, Value, operands, verify_graph


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Hardswish(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Hardswish(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(8 * 64, 4),
    )


def captured(trained: tuple[str, ...], memory_format: torch.memory_format = torch.contiguous_format) -> StepGraph:
    model = net().to(memory_format=memory_format)  # type: ignore[call-overload]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    batch = torch.randn(2, 3, 8, 8).contiguous(memory_format=memory_format), torch.tensor([0, 3])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    graph = capture_step(model, lambda m, x, y: functional.cross_entropy(m(x), y), optimizer, batch).graphs["step"]
    verify_graph(graph)
    return graph


def convolution_inputs(graph: StepGraph) -> set[int]:
    """Return the storages that forward convolutions read, but for parameters and the batch."""
    taken = {graph.values[v].storage for op in graph.ops if op.name == "aten::convolution" for v in operands(op)}
    return {s for s in taken if graph.storages[s].role is Role.TEMPORARY}


def read_backward(graph: StepGraph, names: tuple[str, ...]) -> set[int]:
    later = [op for op in graph.ops if op.phase is Phase.BACKWARD and op.name in names]
    return {graph.values[v].storage for op in later for v in operands(op)}


@pytest.mark.slow
def test_inputs_are_kept_for_trained_weights_only() -> None:
    every = captured(tuple(name for name, _ in net().named_parameters()))
    assert convolution_inputs(every) <= read_backward(every, (BACKWARD,))
    biases = captured(("0.bias", "2.bias", "4.bias", "6.bias"))
    assert not convolution_inputs(biases) & read_backward(biases, (BACKWARD,))
    masks = [op.args[MASK] for op in biases.ops if op.name == BACKWARD]
    assert masks == [(True, True, True), (True, True, True), (False, True, True)]  # as torch's kernels compute
    assert all(op.outputs[-2] is None for op in biases.ops if op.name == BACKWARD)
    last = captured(("4.weight",))
    assert len(convolution_inputs(last) & read_backward(last, (BACKWARD,))) == 1


def test_frozen_layers_before_the_first_trained_one_have_no_backward_pass() -> None:
    head = captured(("6.weight", "6.bias"))
    assert not [op for op in head.ops if op.name == BACKWARD]


def test_other_layouts_keep_their_input() -> None:
    # there the kernels choose by the strides of the input, which a stand-in has not
    graph = captured(("0.bias", "2.bias"), torch.channels_last)
    backward = [op for op in graph.ops if op.name == BACKWARD]
    inputs = [graph.values[a.value] for op in backward if isinstance(a := op.args[INPUT], Ref)]
    assert len(inputs) == 3 and all(value.stride != (0, 0, 0, 0) for value in inputs)


@pytest.mark.parametrize(
    ("shape", "stride", "plain"),
    [((2, 3, 4), (12, 4, 1), True), ((2, 3, 4), (12, 1, 3), False), ((2, 2), (0, 0), False), ((1,), (1,), True)],
)
def test_plain_is_row_after_row(shape: tuple[int, ...], stride: tuple[int, ...], plain: bool) -> None:
    assert is_plain(Value(0, "float32", shape, stride, 0)) is plain
