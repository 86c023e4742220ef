"""Plans within a budget: they fit, cost what they say, train to the same bits, and say when there is none."""

from __future__ import annotations

import numpy as np
import pytest

from port_planner.mcu import CompiledModel, HostEngine, UpdateOptions, compile_model
from port_planner.mcu.choose_plan import BoardDeadlineError, FitOptions
from port_planner.mcu.compile import recompile
from port_planner.mcu.core_costs import core_costs
from port_planner.mcu.memory import ArenaBudgetError
from port_planner.mcu.page_costs import PageMedium
from tests.planner.mcu.networks import NETWORKS


@pytest.fixture(scope="module", params=list(NETWORKS))
def kept(request: pytest.FixtureRequest) -> tuple[CompiledModel, np.ndarray]:
    module, data = NETWORKS[request.param]()
    return compile_model(module, data, name=request.param), data


def least(model: CompiledModel) -> int:
    with pytest.raises(ArenaBudgetError) as raised:
        recompile(model, FitOptions(model.memory.parameters.size_bytes))
    assert raised.value.least_bytes is not None and raised.value.needed_bytes == model.ram_bytes
    return raised.value.least_bytes


@pytest.mark.process
def test_a_plan_within_less_memory_trains_to_the_same_bits(kept: tuple[CompiledModel, np.ndarray]) -> None:
    model, data = kept
    fitted, plan = recompile(model, FitOptions((model.ram_bytes + least(model)) // 2))
    assert fitted.ram_bytes <= (model.ram_bytes + least(model)) // 2
    assert plan.memory.recomputed > 0 or model.ram_bytes == least(model)
    assert plan.overhead >= 0 and (plan.bound_joules is None or plan.bound_joules <= plan.overhead_joules + 1e-12)
    inputs, labels = model.quantize_input(data), np.arange(len(data)) % model.quantized.graph.classes
    engines = [HostEngine(compiled) for compiled in (model, fitted)]
    for engine in engines:
        engine.set_options(UpdateOptions(0.02))
        engine.train_many(np.repeat(inputs, 3, axis=0), np.repeat(labels, 3))
    assert engines[0].parameters == engines[1].parameters and engines[0].state == engines[1].state


def test_nothing_is_computed_again_where_everything_fits(kept: tuple[CompiledModel, np.ndarray]) -> None:
    model, _ = kept
    fitted, plan = recompile(model, FitOptions(model.ram_bytes))
    assert (plan.memory.recomputed, plan.overhead, plan.bound_joules) == (0, 0.0, None)
    assert fitted.generated == model.generated


def test_a_step_that_is_too_slow_is_refused_with_both_times(kept: tuple[CompiledModel, np.ndarray]) -> None:
    model, _ = kept
    seconds = recompile(model, FitOptions(model.ram_bytes, core_costs("mkr1000")))[1].seconds
    with pytest.raises(BoardDeadlineError, match="on mkr1000"):
        recompile(model, FitOptions(model.ram_bytes, core_costs("mkr1000"), deadline_s=seconds * 0.99))
    recompile(model, FitOptions(model.ram_bytes, core_costs("mkr1000"), deadline_s=seconds * 1.01))


@pytest.mark.slow
def test_a_medium_that_wears_or_is_not_mapped_holds_no_parameters_and_says_why(
    kept: tuple[CompiledModel, np.ndarray],
) -> None:
    model, _ = kept
    with pytest.raises(
        ArenaBudgetError, match=r"stay in RAM with nor.*mJ of training and wear its blocks out in 100,000 samples"
    ):
        recompile(model, FitOptions(model.memory.parameters.size_bytes + 300, page=PageMedium.NOR))
    with pytest.raises(ArenaBudgetError, match=r"stay in RAM with sd.*mJ of training; --page psram holds them"):
        recompile(model, FitOptions(model.memory.parameters.size_bytes + 300, page=PageMedium.SD))
