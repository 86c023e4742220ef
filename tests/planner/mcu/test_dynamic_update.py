"""Dynamic partial updates: only the channels whose gradients matter most, the same ones and
the same bits everywhere.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from port_planner.mcu import CompiledModel, HostEngine, UpdateOptions, UpdateRounding, compile_quantized
from port_planner.mcu.autodiff import SparseScheme, StepKind, full_scheme
from port_planner.mcu.choose_plan import FitOptions
from port_planner.mcu.compile import compile_model
from port_planner.mcu.ir import McuCompileError, OpKind
from port_planner.mcu.page_costs import PageMedium
from tests.planner.mcu.networks import NETWORKS, every_layer

RATE = UpdateOptions(0.02, UpdateRounding.NEAREST)
STOCHASTIC = UpdateOptions(0.02)


@pytest.fixture(scope="module", params=list(NETWORKS))
def net(request: pytest.FixtureRequest) -> tuple[CompiledModel, np.ndarray]:
    module, data = NETWORKS[request.param]()
    return compile_model(module, data, name=request.param), data


def with_share(model: CompiledModel, chosen: float | None, fit: FitOptions | None = None) -> CompiledModel:
    return compile_quantized(model.quantized, scheme=replace(model.scheme, chosen=chosen), fit=fit)


def trained(model: CompiledModel, data: np.ndarray, count: int, options: UpdateOptions = STOCHASTIC) -> HostEngine:
    engine = HostEngine(model)
    engine.set_options(options)
    inputs, labels = model.quantize_input(data[:count]), np.arange(count) % model.quantized.graph.classes
    engine.train_many(inputs, labels)
    return engine


@pytest.mark.process
def test_all_of_the_channels_are_the_update_of_everything(net: tuple[CompiledModel, np.ndarray]) -> None:
    model, data = net
    whole, all_chosen = trained(model, data, len(data)), trained(with_share(model, 1.0), data, len(data))
    assert all_chosen.parameters == whole.parameters and all_chosen.state == whole.state


def rows_of(engine: HostEngine, layer: str) -> np.ndarray:
    """Return a layer's weights by output channel."""
    op = engine.model.quantized.graph.op(layer)
    weights = np.frombuffer(engine.values(layer), np.int8)[4 * op.out_shape.channels :]
    return (
        weights.reshape(-1, op.out_shape.channels).T
        if op.kind is OpKind.DEPTHWISE
        else weights.reshape(op.out_shape.channels, -1)
    )


@pytest.mark.process
@pytest.mark.parametrize("chosen", [0.25, 0.5])
def test_chosen_channels_get_the_whole_update_and_the_others_none(
    net: tuple[CompiledModel, np.ndarray], chosen: float
) -> None:
    """One step: gradients are those of the whole update, so what is trained is trained alike,
    whatever the draws in between.
    """
    model, data = net
    some = with_share(model, chosen)
    before, whole, part = HostEngine(model), trained(model, data, 1), trained(some, data, 1)
    differs = 0
    for op in model.quantized.graph.weighted():
        first, all_rows, chosen_rows = (rows_of(engine, op.name) for engine in (before, whole, part))
        groups = -(-op.out_shape.channels // 4)
        kept = [(chosen_rows[4 * g : 4 * g + 4] == first[4 * g : 4 * g + 4]).all() for g in range(groups)]
        same = [(chosen_rows[4 * g : 4 * g + 4] == all_rows[4 * g : 4 * g + 4]).all() for g in range(groups)]
        assert all(a or b for a, b in zip(kept, same, strict=True))
        assert sum(not k for k in kept) <= -(-groups * round(256 * chosen) // 256)
        differs += int((all_rows != chosen_rows).sum())
    assert differs > 0 and part.state == whole.state


@pytest.mark.process
def test_the_channels_are_those_with_the_largest_gradients() -> None:
    module, data = every_layer()
    model = compile_model(module, data, name="every_layer")
    some = with_share(model, 0.25)
    engine, magnitudes = HostEngine(some), {}
    rows = some.memory.rows

    def look(step: int) -> None:
        if step < len(rows) and rows[step].kind is StepKind.WEIGHT:
            op = some.quantized.graph.op(rows[step].op)
            shape = op.out_shape
            gradient = engine.tensor(rows[step].gradient, shape.elements, np.float32).reshape(-1, shape.channels)
            groups = [np.abs(gradient[:, c : c + 4]).sum() for c in range(0, shape.channels, 4)]
            magnitudes[op.name] = np.array(groups), engine.tensor(f"norm:{op.name}", len(groups), np.float32)

    engine.set_options(RATE)
    engine.observe(look)
    engine.train(some.quantize_input(data)[0], 2)
    assert set(magnitudes) == {op.name for op in some.quantized.graph.weighted()}
    for groups, found in magnitudes.values():
        taken = found == -1.0
        assert taken.sum() == -(-len(groups) * 64 // 256)
        assert groups[taken].min() >= groups[~taken].max() * (1 - 1e-5)


@pytest.mark.process
def test_dynamic_updates_go_with_less_memory_and_pages() -> None:
    module, data = every_layer()
    model = compile_model(module, data, name="every_layer")
    some = with_share(model, 0.25)
    less = with_share(model, 0.25, FitOptions(int(0.8 * some.ram_bytes), page=PageMedium.PSRAM))
    assert less.memory.recomputed or less.memory.paged
    one, other = trained(some, data, len(data)), trained(less, data, len(data))
    layers = [op.name for op in model.quantized.graph.weighted()]
    assert one.state == other.state and all(one.values(name) == other.values(name) for name in layers)


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(McuCompileError, match="give a share above 0"):
        SparseScheme({}, chosen=0.0)


def test_the_scheme_says_what_a_step_trains(net: tuple[CompiledModel, np.ndarray]) -> None:
    model, _ = net
    scheme = replace(full_scheme(model.quantized.graph), chosen=0.25)
    assert scheme.describe().endswith("of the channels the 25% with the largest gradients")
    assert with_share(model, 0.25).sha256 != with_share(model, 0.5).sha256 != model.sha256
