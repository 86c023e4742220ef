"""The engine built for the host against torch: every activation exact, every gradient to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from port_planner.base.targets import with_targets
from port_planner.mcu import CompiledModel, HostEngine, Loss, UpdateOptions, UpdateRounding, compile_model
from port_planner.mcu.choose_plan import FitOptions
from port_planner.mcu.compile import recompile
from port_planner.mcu.host import FAST, EngineError
from port_planner.mcu.ir import PRODUCTS, WEIGHTED, OpKind, row_bytes
from port_planner.mcu.memory import ParameterSlot
from port_planner.mcu.page_costs import PageMedium
from port_planner.mcu.quantize import (
    QuantizedOp,
    concat_axis,
    convolved,
    flat_input,
    run_float,
    tabulated_function,
    torch_weight,
)
from tests.planner.mcu.networks import BUILDS
from tests.planner.mcu.reference import reference_forward, reference_logits

VARIANTS = {"scalar": (), "simd": FAST}


@pytest.fixture(scope="module", params=list(BUILDS))
def compiled(request: pytest.FixtureRequest) -> tuple[CompiledModel, torch.nn.Module, np.ndarray]:
    module, data = BUILDS[request.param]()
    return compile_model(module, data, name=request.param, q88=True), module, data


def test_import_computes_what_the_module_computes(compiled: tuple[CompiledModel, torch.nn.Module, np.ndarray]) -> None:
    model, module, data = compiled
    graph = model.quantized.graph
    with torch.no_grad():
        imported = run_float(graph, torch.from_numpy(data))[graph.ops[-1].name].flatten(1)
        torch.testing.assert_close(imported, module(torch.from_numpy(data)), rtol=1e-4, atol=1e-5)


@pytest.mark.process
def test_every_activation_equals_the_int64_reference(
    compiled: tuple[CompiledModel, torch.nn.Module, np.ndarray],
) -> None:
    model, _, data = compiled
    graph = model.quantized.graph
    inputs = model.quantize_input(data)
    expected = reference_forward(model.quantized, inputs)
    logits = reference_logits(model.quantized, expected[graph.ops[-1].name])
    for flags in VARIANTS.values():
        engine = HostEngine(model, flags)
        seen: dict[str, np.ndarray] = {}

        def record(step: int, engine: HostEngine = engine, seen: dict[str, np.ndarray] = seen) -> None:
            op = graph.ops[step]
            if op.kind is not OpKind.CLASSIFIER:
                seen[op.name] = engine.tensor(op.name, op.out_shape.elements)

        engine.observe(record)
        for number, sample in enumerate(inputs):
            predicted, computed = engine.infer(sample)
            for name, values in seen.items():
                np.testing.assert_array_equal(values, expected[name][number].permute(1, 2, 0).reshape(-1).numpy())
            np.testing.assert_array_equal(computed, logits[number])
            assert predicted == int(np.argmax(logits[number]))
        assert len(seen) == len(graph.ops) - 1


@pytest.mark.process
def test_scalar_and_simd_train_to_the_same_bits(compiled: tuple[CompiledModel, torch.nn.Module, np.ndarray]) -> None:
    model, _, data = compiled
    inputs = model.quantize_input(data)
    labels = np.arange(len(data)) % model.quantized.graph.classes
    engines = [HostEngine(model, flags) for flags in VARIANTS.values()]
    for engine in engines:
        engine.set_options(UpdateOptions(0.02))
        engine.train_many(np.repeat(inputs, 3, axis=0), np.repeat(labels, 3))
    assert engines[0].parameters == engines[1].parameters
    assert engines[0].state == engines[1].state
    assert engines[0].parameters != HostEngine(model).parameters


def real_gradients(
    model: CompiledModel, sample: np.ndarray, label: int, targets: np.ndarray | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Autograd through the dequantised network, straight through the rounding, zero where the clamp held.

    `targets`: of a model that learns numbers.
    """
    graph = model.quantized.graph
    integers = reference_forward(model.quantized, sample[None])
    start = model.quantized.input
    tensors = {graph.input_name: (integers[graph.input_name] - start.zero).double() * float(start.scale)}
    leaves: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for op in model.quantized.ops:
        value = _real(op, [tensors[name] for name in op.op.inputs], leaves)
        if op.op.kind is OpKind.CLASSIFIER:
            if targets is None:
                loss = F.cross_entropy(value.flatten(1), torch.tensor([label]))
            else:
                loss = F.mse_loss(value.flatten(1), torch.from_numpy(targets)[None].double())
            loss.backward()
            break
        stored = integers[op.op.name]
        saturates = op.op.kind in {*WEIGHTED, *PRODUCTS, OpKind.ADD} - {OpKind.GRU} and not op.op.fixed
        if saturates or op.op.clamp.value[0] is not None:
            value = value * ((stored > op.out_min) & (stored < op.out_max)).double()
        tensors[op.op.name] = value + ((stored - op.output.zero).double() * float(op.output.scale) - value).detach()
    return {name: (_gradient(weight), _gradient(bias)) for name, (weight, bias) in leaves.items()}


def _gradient(leaf: torch.Tensor) -> np.ndarray:
    assert leaf.grad is not None
    return leaf.grad.numpy()


def _real(
    op: QuantizedOp, inputs: list[torch.Tensor], leaves: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    if op.op.kind is OpKind.ADD:
        return inputs[0] + inputs[1]
    if op.op.kind in PRODUCTS:
        return inputs[0] * inputs[1]
    if op.op.kind is OpKind.CONCAT:
        return torch.cat(inputs, concat_axis(op.op))
    if op.op.kind is OpKind.UPSAMPLE:
        return F.interpolate(inputs[0], scale_factor=op.op.kernel)
    if op.op.kind is OpKind.TABLE:
        value = tabulated_function(op.op)(inputs[0])
        low, high = (
            (limit - op.output.zero) * float(op.output.scale) for limit in (op.out_min - 0.5, op.out_max + 0.5)
        )
        return torch.where((value >= low) & (value < high), value, value.detach())
    if op.op.kind is OpKind.AVERAGE_POOL:
        return F.avg_pool2d(inputs[0], op.op.kernel, op.op.stride, op.op.padding)
    if op.op.kind is OpKind.MAX_POOL:
        return F.max_pool2d(inputs[0], op.op.kernel, op.op.stride, op.op.padding)
    assert op.weight is not None and op.weight_scale is not None and op.bias is not None
    scale = torch.from_numpy(op.weight_scale.astype(np.float64))
    weight = (torch_weight(op.op, op.weight).double() * scale.view(-1, 1, 1, 1)).requires_grad_()
    bias = (torch.from_numpy(op.bias).double() * scale * float(op.read_scale)).requires_grad_()
    leaves[op.op.name] = (weight, bias)
    if op.op.kind is OpKind.GRU:
        return _states(op, inputs[0], weight.flatten(1), bias)
    return convolved(op.op, flat_input(op.op, inputs[0]), weight, bias)


def _states(op: QuantizedOp, data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A gated recurrent unit; derivatives read the codes of the state, as the products do."""
    scale, found = float(op.output.scale), []
    state = rounded = torch.zeros(len(data), op.op.out_shape.channels, dtype=torch.float64)
    for step in data.flatten(2).unbind(2):
        reset, update, new = step.chunk(3, 1)
        of_reset, of_update, of_new = F.linear(rounded, weight, bias).chunk(3, 1)
        candidate = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
        gate = torch.sigmoid(update + of_update)
        lost = gate.detach() * (state - rounded).detach()
        state = (1 - gate) * candidate + gate * rounded + lost
        rounded = state + ((state / scale + 0.5).floor().clamp(-128, 127) * scale - state).detach()
        found.append(state)
    return torch.stack(found, 2)[:, :, None]


@pytest.mark.process
def test_every_parameter_gradient_equals_autograd_to_rounding(
    compiled: tuple[CompiledModel, torch.nn.Module, np.ndarray],
) -> None:
    model, _, data = compiled
    inputs = model.quantize_input(data)
    for number, label in ((0, 0), (1, 2)):
        compare_step(model, inputs[number], label, real_gradients(model, inputs[number], label))


@pytest.mark.process
@pytest.mark.parametrize("build", ["joins", "choices"])
def test_squared_errors_have_torchs_gradients_to_rounding(build: str) -> None:
    """The second network ends in no linear layer: its outputs are those of a layer that is not trained."""
    module, data = BUILDS[build]()
    model = compile_model(module, data, name=build, loss=Loss.MSE, q88=True)
    inputs, outputs = model.quantize_input(data), model.quantized.graph.targets
    targets = np.random.default_rng(1).normal(size=(len(data), outputs)).astype(np.float32)
    rows = with_targets(inputs, targets, outputs)
    for number in (0, 1):
        compare_step(model, rows[number], 0, real_gradients(model, inputs[number], 0, targets[number]))
    engine = HostEngine(model)
    engine.set_options(UpdateOptions(0.0))
    answers = np.stack([engine.infer(row)[1] for row in inputs])
    expected = float(F.mse_loss(torch.from_numpy(answers).double(), torch.from_numpy(targets).double()))
    assert engine.evaluate(rows, np.zeros(len(rows), np.int64)) == (pytest.approx(expected, rel=1e-5), 0.0)
    assert engine.train(rows[3], 0) == (pytest.approx(np.mean((answers[3] - targets[3]) ** 2), rel=1e-5), False)


@pytest.mark.process
def test_targets_outlive_recomputation_and_pages() -> None:
    """Less memory gives the same bits; a label, or a target that is not finite, is refused before anything moves."""
    module, data = BUILDS["every_layer"]()
    kept = compile_model(module, data, loss=Loss.MSE)
    targets = np.random.default_rng(2).normal(size=(len(data), 7))
    rows, zeros = with_targets(kept.quantize_input(data), targets, 7), np.zeros(len(data), np.int64)
    trained = []
    for limits in (None, FitOptions(int(0.8 * kept.ram_bytes)), FitOptions(kept.ram_bytes // 2, page=PageMedium.PSRAM)):
        model = kept if limits is None else recompile(kept, limits)[0]
        assert limits is None or model.ram_bytes <= limits.ram_bytes
        engine = HostEngine(model)
        engine.set_options(UpdateOptions(0.01))
        losses = engine.train_many(rows, zeros), engine.evaluate(rows, zeros)
        trained.append((losses, [engine.values(op.name) for op in model.quantized.graph.weighted()]))
        before = engine.parameters
        for row, label in ((rows[0], 1), (with_targets(rows[:1, : -4 * 7], targets[:1], 7)[0] | np.int8(-1), 0)):
            with pytest.raises(EngineError, match="status 4"):
                engine.train(row, label)
        assert engine.parameters == before
    assert trained[0] == trained[1] == trained[2]


def compare_step(
    model: CompiledModel, row: np.ndarray, label: int, gradients: dict[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    """One Q8.8 step shows each gradient in 1/256 of a weight and in whole bias units."""
    rate, layout, engine, compared = 1e-3, model.memory.parameters, HostEngine(model), 0
    engine.set_options(UpdateOptions(rate, UpdateRounding.Q88))
    before = engine.parameters
    engine.train(row, label)
    after = engine.parameters
    for op in model.quantized.ops:
        if op.op.name not in gradients or op.op.fixed:
            continue
        slot = layout.slots[op.op.name]
        assert op.weight_scale is not None and slot.bias_offset is not None
        count = op.op.rows * row_bytes(op.op)
        moved = _q88(before, slot, count) - _q88(after, slot, count)
        scale = op.weight_scale if op.op.kind is OpKind.DEPTHWISE else op.weight_scale[:, None, None, None]
        wanted = rate * _layout(op, gradients[op.op.name][0]) / scale
        clipped = np.abs(_q88(after, slot, count)) >= 126.9
        error = np.abs(moved - wanted.reshape(-1))[~clipped]
        assert error.max() <= 0.5 / 256 * 1.001 + 1e-4 * np.abs(wanted).max(), op.op.name
        bias_moved = _int32(before, slot.bias_offset, op.op.rows) - _int32(after, slot.bias_offset, op.op.rows)
        bias_wanted = rate * gradients[op.op.name][1] / (op.weight_scale.astype(np.float64) * op.read_scale)
        assert np.abs(bias_moved - bias_wanted).max() <= 0.5 + 1e-4 * np.abs(bias_wanted).max(), op.op.name
        compared += int(np.count_nonzero(wanted))
    assert compared > 100


def _q88(image: bytes, slot: ParameterSlot, count: int) -> np.ndarray:
    assert slot.weight_offset is not None and slot.q88_offset is not None
    high = np.frombuffer(image, np.int8, count, slot.weight_offset).astype(np.float64)
    low = np.frombuffer(image, np.uint8, count, slot.q88_offset).astype(np.float64) - 128
    return np.add(high, low / 256)


def _int32(image: bytes, offset: int, count: int) -> np.ndarray:
    return np.frombuffer(image, "<i4", count, offset).astype(np.int64)


def _layout(op: QuantizedOp, gradient: np.ndarray) -> np.ndarray:
    return gradient[:, 0].transpose(1, 2, 0) if op.op.kind is OpKind.DEPTHWISE else gradient.transpose(0, 2, 3, 1)


@pytest.mark.process
def test_loss_equals_torch_cross_entropy(compiled: tuple[CompiledModel, torch.nn.Module, np.ndarray]) -> None:
    model, _, data = compiled
    inputs = model.quantize_input(data)
    engine = HostEngine(model)
    engine.set_options(UpdateOptions(0.0))
    for number in range(4):
        _, logits = engine.infer(inputs[number])
        loss, right = engine.train(inputs[number], 1)
        expected = F.cross_entropy(torch.from_numpy(logits)[None].double(), torch.tensor([1]))
        assert loss == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
        assert right == (int(np.argmax(logits)) == 1)
