"""How int8 weights move: not at rate 0, without bias under stochastic rounding, towards zero under truncation."""

from __future__ import annotations

import numpy as np
import pytest

from port_planner.mcu import CompiledModel, HostEngine, UpdateOptions, UpdateRounding, compile_model, compile_quantized
from port_planner.mcu.host import EngineError, EngineState
from tests.planner.mcu.networks import every_layer

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def model() -> tuple[CompiledModel, np.ndarray, np.ndarray]:
    module, data = every_layer(40)
    compiled = compile_model(module, data, q88=True)
    return compiled, compiled.quantize_input(data), np.arange(len(data)) % 7


def weights(model: CompiledModel, image: bytes) -> np.ndarray:
    layout = model.memory.parameters
    return np.frombuffer(image, np.int8, layout.weight_bytes, layout.bias_bytes).astype(np.int64)


def trained(
    model: CompiledModel, inputs: np.ndarray, labels: np.ndarray, options: UpdateOptions
) -> tuple[np.ndarray, np.ndarray]:
    engine = HostEngine(model)
    before = weights(model, engine.parameters)
    engine.set_options(options)
    engine.train_many(inputs, labels)
    return before, weights(model, engine.parameters)


@pytest.mark.parametrize("rule", list(UpdateRounding))
@pytest.mark.parametrize("scaling", [True, False])
def test_rate_zero_changes_nothing(
    model: tuple[CompiledModel, np.ndarray, np.ndarray], rule: UpdateRounding, scaling: bool
) -> None:
    compiled, inputs, labels = model
    engine = HostEngine(compiled)
    before = engine.parameters
    engine.set_options(UpdateOptions(0.0, rule, scaling))
    engine.train_many(inputs, labels)
    assert engine.parameters == before


def towards_zero(before: np.ndarray, after: np.ndarray) -> tuple[float, int]:
    changed = (before != after) & (before != 0)
    return float((np.abs(after) < np.abs(before))[changed].mean()), int(changed.sum())


def test_a_tiny_rate_moves_half_of_the_changes_towards_zero(
    model: tuple[CompiledModel, np.ndarray, np.ndarray],
) -> None:
    compiled, inputs, labels = model
    share, changes = towards_zero(*trained(compiled, inputs, labels, UpdateOptions(1e-4, UpdateRounding.STOCHASTIC)))
    assert changes > 100
    assert 0.4 <= share <= 0.6


def test_truncation_decays_every_weight_towards_zero(model: tuple[CompiledModel, np.ndarray, np.ndarray]) -> None:
    """The rule of TinyEngine, kept for comparison: whatever the rate, changes only shrink weights."""
    compiled, inputs, labels = model
    share, changes = towards_zero(*trained(compiled, inputs, labels, UpdateOptions(1e-6, UpdateRounding.TRUNCATE)))
    assert changes > 1000
    assert share == 1.0


def test_nearest_loses_small_steps_and_q88_keeps_them(model: tuple[CompiledModel, np.ndarray, np.ndarray]) -> None:
    compiled, inputs, labels = model
    options = UpdateOptions(1e-4, UpdateRounding.NEAREST)
    before, after = trained(compiled, inputs[:4], labels[:4], options)
    np.testing.assert_array_equal(before, after)
    engine = HostEngine(compiled)
    start = engine.parameters
    engine.set_options(UpdateOptions(1e-3, UpdateRounding.Q88))
    engine.train_many(inputs, labels)
    low = slice(compiled.memory.parameters.bias_bytes + compiled.memory.parameters.weight_bytes, None)
    assert engine.parameters[low] != start[low]


def test_stochastic_rounding_is_unbiased(model: tuple[CompiledModel, np.ndarray, np.ndarray]) -> None:
    """Over many generators the mean move of a weight is its fp32 step."""
    compiled, inputs, labels = model
    engine = HostEngine(compiled)
    engine.set_options(UpdateOptions(5e-3, UpdateRounding.Q88))
    start = engine.parameters
    engine.train(inputs[0], int(labels[0]))
    layout = compiled.memory.parameters
    low = np.frombuffer(engine.parameters, np.uint8, layout.weight_bytes, layout.bias_bytes + layout.weight_bytes)
    exact = weights(compiled, engine.parameters) + (low.astype(np.float64) - 128) / 256 - weights(compiled, start)
    total = np.zeros_like(exact)
    engine.set_options(UpdateOptions(5e-3, UpdateRounding.STOCHASTIC))
    rounds = 200
    for seed in np.random.default_rng(1).integers(0, 2**32, rounds):
        engine.reset()
        engine.state = EngineState(int(seed), 0)
        engine.train(inputs[0], int(labels[0]))
        total += weights(compiled, engine.parameters) - weights(compiled, start)
    moving = (np.abs(exact) > 0.02) & (np.abs(weights(compiled, start)) < 120)
    error = (total / rounds - exact)[moving]
    assert moving.sum() > 50
    assert abs(error.mean()) < 0.02
    assert np.abs(error).max() < 0.25


def test_the_generator_is_all_a_resume_needs(model: tuple[CompiledModel, np.ndarray, np.ndarray]) -> None:
    compiled, inputs, labels = model
    whole, first, second = HostEngine(compiled), HostEngine(compiled), HostEngine(compiled)
    for engine in (whole, first, second):
        engine.set_options(UpdateOptions(0.01))
    whole.train_many(inputs, labels)
    first.train_many(inputs[:17], labels[:17])
    second.parameters, second.state = first.parameters, first.state
    second.train_many(inputs[17:], labels[17:])
    assert second.parameters == whole.parameters
    assert second.state == whole.state


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_senseless_rates_are_refused(model: tuple[CompiledModel, np.ndarray, np.ndarray], rate: float) -> None:
    with pytest.raises(EngineError):
        HostEngine(model[0]).set_options(UpdateOptions(rate))


def test_q88_needs_its_storage() -> None:
    module, data = every_layer(4)
    with pytest.raises(EngineError, match="status 5"):
        HostEngine(compile_model(module, data)).set_options(UpdateOptions(0.1, UpdateRounding.Q88))


def test_layers_without_low_bytes_round_stochastically_and_the_others_to_nearest(
    model: tuple[CompiledModel, np.ndarray, np.ndarray],
) -> None:
    """After one step, each layer has the bits of the rule it is under: the gradients of that step are the same."""
    compiled, inputs, labels = model
    layers = [op.name for op in compiled.quantized.graph.weighted()]
    narrow = set(layers[1::2])
    mixed = compile_quantized(compiled.quantized, scheme=compiled.scheme.with_low_bytes(narrow))
    assert mixed.q88 and mixed.ram_bytes < compiled.ram_bytes
    engines = {}
    for name, built, rule in (
        ("mixed", mixed, UpdateRounding.Q88),
        ("wide", compiled, UpdateRounding.Q88),
        ("int8", compiled, UpdateRounding.STOCHASTIC),
    ):
        engine = engines[name] = HostEngine(built)
        engine.set_options(UpdateOptions(5e-3, rule))
        engine.train(inputs[0], int(labels[0]))
    for layer in layers:
        biases = 4 * compiled.quantized.graph.op(layer).out_shape.channels
        found = {name: engine.values(layer)[biases:] for name, engine in engines.items()}
        assert found["mixed"] == found["int8" if layer in narrow else "wide"]
    assert any(engines["int8"].values(layer) != engines["wide"].values(layer) for layer in narrow)
    assert engines["mixed"].state == engines["wide"].state


def test_a_huge_rate_stays_within_int8(model: tuple[CompiledModel, np.ndarray, np.ndarray]) -> None:
    compiled, inputs, labels = model
    for rule in UpdateRounding:
        _, after = trained(compiled, inputs[:8], labels[:8], UpdateOptions(1e20, rule))
        assert after.min() >= -127 and after.max() <= 127
