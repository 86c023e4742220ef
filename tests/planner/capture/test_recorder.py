"""A step is recorded as it runs: layouts are the kernels' own, constants are kept, random numbers are placed."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.base.errors import CaptureError
from port_planner.capture.recorder import StepRecorder
from port_planner.ir.graph import Phase, Role, references


def test_every_gradient_is_made_on_the_tape_with_its_own_layout() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    recorder = StepRecorder()
    for name, parameter in model.named_parameters():
        recorder.add(parameter, Role.PARAMETER, name)
    for name, buffer in model.named_buffers():
        recorder.add(buffer, Role.BUFFER, name)
    with recorder:
        loss = model(torch.randn(2, 3, 8, 8)).square().mean()
        recorder.phase = Phase.BACKWARD
        loss.backward()
    made = {v for op in recorder.tape.ops if op.phase is Phase.BACKWARD for v in op.outputs}
    for parameter in model.parameters():
        assert parameter.grad is not None
        value = recorder.value_of(parameter.grad)
        assert value in made
        assert recorder.tape.values[value].stride == parameter.grad.stride()


def test_a_tensor_from_outside_is_a_constant_with_its_contents() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])
    recorder = StepRecorder()
    with recorder:
        torch.zeros(3) + weights
    (constant,) = [s for s in recorder.tape.storages if s.role is Role.CONSTANT]
    assert constant.data is not None
    assert torch.equal(constant.data.view(torch.float32), weights)


def test_random_operators_say_where_the_generator_stood() -> None:
    recorder = StepRecorder()
    torch.manual_seed(0)
    start = recorder.generators()
    with recorder:
        functional.dropout(torch.ones(8) + torch.rand(8), 0.5)
    drawing = [op for op in recorder.tape.ops if op.random]
    assert len(drawing) == 2
    assert [op.draws_from for op in drawing] == [start, drawing[0].draws_to]
    assert drawing[1].draws_to == recorder.generators() != start


def test_a_view_is_no_operator() -> None:
    recorder = StepRecorder()
    with recorder:
        x = torch.ones(4, 6)
        x.view(6, 4).t() + 1
    names = [op.name for op in recorder.tape.ops]
    assert names == ["aten::ones", "aten::add.Tensor"]
    (operand,) = references(recorder.tape.ops[1].args[0])
    assert recorder.tape.values[operand].shape == (4, 6)


def test_a_lazy_conjugate_is_recorded_as_the_operator_that_kernels_run_first() -> None:
    recorder = StepRecorder()
    turned = torch.polar(torch.ones(3), torch.arange(3.0))
    with recorder:
        result = turned.conj() * 2
    names = [op.name for op in recorder.tape.ops]
    assert [n for n in names if n != "aten::clone"] == ["aten::conj_physical", "aten::mul.Tensor"]
    assert torch.equal(result, turned.conj().resolve_conj() * 2)


def test_a_view_in_place_is_no_operator_and_a_resize_is() -> None:
    recorder = StepRecorder()
    with recorder:
        x = torch.ones(4, 6)
        x.t_()
        x + 1
        x.resize_(30, 30)
    assert [op.name for op in recorder.tape.ops] == ["aten::ones", "aten::add.Tensor", "aten::resize_"]
    (operand,) = references(recorder.tape.ops[1].args[0])
    assert recorder.tape.values[operand].shape == (6, 4)


def test_a_tensor_without_memory_is_refused_in_the_step_and_stands_for_a_real_one_in_the_update() -> None:
    weights = torch.ones(2, 3)
    recorder = StepRecorder()
    value = recorder.add(weights, Role.PARAMETER, "weights")
    with recorder, pytest.raises(CaptureError, match="a tensor on meta"):
        torch.zeros(3, device="meta") + 1
    recorder.phase = Phase.UPDATE
    stand_in = recorder.stand_in(value)
    with recorder:
        made = stand_in.add_(1).sqrt()
    assert recorder.value_of(stand_in) == value
    assert recorder.tape.storages[recorder.tape.values[recorder.value_of(made)].storage].device == "cpu"
    assert torch.equal(weights, torch.ones(2, 3))
