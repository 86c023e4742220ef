"""Real values as int8: zero is exact, nothing calibrated is clipped, and a ratio is a
multiplier and a shift to 31 bits.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from port_planner.mcu.compile import compile_model
from port_planner.mcu.frontend import import_module
from port_planner.mcu.host import HostEngine, UpdateOptions
from port_planner.mcu.ir import Clamp, McuCompileError, OpKind
from port_planner.mcu.quantize import (
    WEIGHT_HEADROOM,
    QuantizedGraph,
    logits_error,
    quantize,
    requantisation,
    rounded_logits,
    run_float,
    typical_error,
    weights_of,
)
from tests.planner.mcu.networks import every_layer, hidden_linear, joins, stream
from tests.planner.mcu.reference import reference_forward, reference_logits


def quantized(build: object = every_layer, headroom: float = 1.0) -> tuple[QuantizedGraph, np.ndarray]:
    module, data = build()  # type: ignore[operator]
    return quantize(import_module(module, data.shape[1:]), data, headroom), data


@pytest.mark.slow
@given(st.lists(st.floats(1e-12, 0.2499), min_size=1, max_size=8))
def test_a_ratio_is_a_multiplier_and_a_shift_to_31_bits(ratios: list[float]) -> None:
    exact = np.array(ratios)
    multiplier, shift = requantisation(exact)
    assert (shift >= 33).all() and (shift <= 62).all() and (multiplier >= 0).all()
    found = multiplier.astype(np.float64) / 2.0 ** shift.astype(np.float64)
    assert (np.abs(found - exact) <= np.maximum(exact * 2.0**-30, 2.0**-62)).all()


def test_a_ratio_just_below_a_power_of_two_does_not_overflow() -> None:
    multiplier, shift = requantisation(np.array([0.125 * (1 - 2.0**-40), 0.125]))
    assert multiplier[0] / 2.0 ** int(shift[0]) == multiplier[1] / 2.0 ** int(shift[1]) == 0.125


@pytest.mark.slow
@pytest.mark.parametrize("build", [every_layer, hidden_linear, stream])
@pytest.mark.parametrize("headroom", [1.0, 1.5])
def test_zero_is_exact_and_nothing_that_was_calibrated_is_clipped(build: object, headroom: float) -> None:
    model, data = quantized(build, headroom)
    tensors = run_float(model.graph, torch.from_numpy(data))
    for op in model.ops:
        scale, zero = float(op.output.scale), op.output.zero
        assert -128 <= zero <= 127 and op.out_min <= zero <= max(op.out_max, zero)
        if op.op.kind in (OpKind.CLASSIFIER, OpKind.AVERAGE_POOL, OpKind.MAX_POOL):
            continue
        real = tensors[op.op.name].detach().numpy()
        low, high = (op.out_min - zero) * scale, (op.out_max - zero) * scale
        assert real.min() >= low - 1.001 * scale and real.max() <= high + 1.001 * scale, op.op.name


@pytest.mark.slow
def test_an_activation_function_is_the_interval_of_its_op() -> None:
    model, _ = quantized(headroom=1.5)
    for op in model.ops:
        if op.op.clamp is not Clamp.NONE and op.op.kind is not OpKind.ADD:
            assert op.out_min == max(-128, op.output.zero)
        if op.op.clamp is Clamp.RELU6:
            assert (op.out_max - op.output.zero) * float(op.output.scale) <= 6.0 + float(op.output.scale)


@pytest.mark.slow
@pytest.mark.parametrize("headroom", [1.0, 1.1, 1.5])
def test_weights_have_as_much_room_to_grow_as_is_asked_up_to_a_limit(headroom: float) -> None:
    model, _ = quantized(headroom=headroom)
    for op in model.ops:
        if op.weight is None or op.weight_scale is None:
            continue
        most = np.abs(op.weight.astype(int)).reshape(-1, op.weight.shape[-1]).max(0)
        if op.op.kind is not OpKind.DEPTHWISE:
            most = np.abs(op.weight.astype(int)).reshape(op.weight.shape[0], -1).max(1)
        assert (np.abs(most - 127 / min(headroom, WEIGHT_HEADROOM)) <= 1).all()
        real, _ = weights_of(op.op)
        scale = op.weight_scale if op.op.kind is OpKind.DEPTHWISE else op.weight_scale[:, None, None, None]
        assert (np.abs(op.weight * scale - real) <= 0.5001 * scale).all()


@pytest.mark.slow
def test_samples_become_bytes_row_by_row_channel_last_and_what_is_outside_is_held() -> None:
    model, data = quantized()
    rows = model.quantize_input(data)
    assert rows.shape == (len(data), model.graph.input_shape.elements) and rows.dtype == np.int8
    back = (rows.astype(np.float32) - model.input.zero) * model.input.scale
    shape = model.graph.input_shape
    seen = back.reshape(len(data), shape.height, shape.width, shape.channels).transpose(0, 3, 1, 2)
    assert np.abs(seen - data.reshape(seen.shape)).max() <= 0.5001 * float(model.input.scale)
    assert set(np.unique(model.quantize_input(1e6 * np.sign(data)))) <= {-128, 127, model.input.zero}


def test_headroom_below_one_would_clip() -> None:
    with pytest.raises(McuCompileError, match=r"headroom: 0.9 would clip the calibration data; use 1.0 or more"):
        quantized(headroom=0.9)


def test_logits_rounded_in_float_are_those_of_the_integers() -> None:
    model, data = quantized(joins, headroom=1.5)
    sums = reference_forward(model, model.quantize_input(data))[model.graph.ops[-1].name]
    assert logits_error(rounded_logits(model, data), reference_logits(model, sums)) < 0.05


def test_an_error_of_logits_is_none_of_their_bias() -> None:
    wanted = np.array([[100.0, 1.0], [100.0, -1.0]], np.float32)
    assert logits_error(wanted, wanted) == 0
    assert logits_error(np.array([[100.0, 0.0], [100.0, 0.0]], np.float32), wanted) == pytest.approx(1)


def test_a_single_distant_sample_hides_no_error_of_the_others() -> None:
    """A glitch in the calibration data stretches the range of the input, and int8 has one
    code for all other samples.
    """
    torch.manual_seed(0)
    data = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    errors = []
    for value in (1.0, 1e4):
        data[0, 0] = value
        module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        model = quantize(import_module(module, (6,)), data)
        with torch.no_grad():
            wanted = module(torch.from_numpy(data)).numpy()
        found = rounded_logits(model, data)
        errors.append((logits_error(found, wanted), typical_error(found, wanted)))
    (all_usual, usual), (all_distant, distant) = errors
    assert max(all_usual, usual) < 0.1 and all_distant < 0.1 and distant > 0.5


def test_the_bias_of_a_channel_without_weights_is_not_clipped() -> None:
    torch.manual_seed(0)
    layer, data = nn.Linear(6, 4), np.random.default_rng(0).normal(0, 1e-3, (20, 6)).astype(np.float32)
    with torch.no_grad():
        layer.weight[:2], layer.bias[:2] = 0.0, torch.tensor([3.0, -3.0])
    model = quantize(import_module(nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 2)), (6,)), data)
    first = model.ops[0]
    codes, scale = np.asarray(first.bias), np.asarray(first.weight_scale)
    np.testing.assert_allclose(codes[:2] * scale[:2] * first.inputs[0].scale, [3.0, -3.0], rtol=1e-5)


class Branch(nn.Module):
    """A layer beside the one that adds to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        logits: torch.Tensor = self.head(x + torch.tanh(self.branch(x)))
        return logits


@pytest.mark.slow
@pytest.mark.parametrize("zeros", ["head", "branch", "a row of the head"])
def test_weights_of_zeros_learn_as_others_do(zeros: str) -> None:
    """A head that begins at zero, a branch that begins as nothing, a class that was added:
    common starts of fine-tuning.
    """
    torch.manual_seed(0)
    module, rng, labels = Branch().eval(), np.random.default_rng(0), np.arange(400) % 2
    data = rng.normal(size=(400, 16)).astype(np.float32)
    data[labels == 1, :4] += 1.5
    layer = module.branch if zeros == "branch" else module.head
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter[1 if zeros == "a row of the head" else slice(None)] = 0
    model = compile_model(module, data[:200])
    engine, rows = HostEngine(model), model.quantize_input(data)
    engine.set_options(UpdateOptions(0.05))
    slot = model.memory.parameters.slots["branch" if zeros == "branch" else "head"]
    before = np.frombuffer(engine.parameters, np.int8)
    for _ in range(3):
        engine.train_many(rows[:300], labels[:300])
    after = np.frombuffer(engine.parameters, np.int8)
    assert slot.weight_offset is not None
    part = slice(slot.weight_offset, slot.weight_offset + (64 if zeros == "branch" else 16))
    assert (after[part] != before[part]).mean() > 0.8
    right = [engine.infer(row)[0] == label for row, label in zip(rows[300:], labels[300:], strict=True)]
    assert np.mean(right) > 0.8
