"""Training less or paging more: what is measured of candidates, and which one the rule takes."""

from __future__ import annotations

import pytest
import torch

from port_planner.mcu.autodiff import SparseScheme, last_layers
from port_planner.mcu.choose_plan import FitOptions
from port_planner.mcu.compile import CompiledModel, compile_model, recompile
from port_planner.mcu.host import UpdateOptions
from port_planner.mcu.memory import ArenaBudgetError
from port_planner.mcu.page_costs import PageMedium
from port_planner.mcu.schemes.value import Valuation, ValuedCandidate, max_per_joule, value_candidates, value_schemes
from port_planner.mcu.zoo import DigitsNet
from tests.planner.mcu.networks import bars, settled

RAM = 6_500
"""The digits net needs 9,500 bytes for everything, 6,000 for its head and the layer before."""


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    torch.manual_seed(1)
    data, _ = bars()
    network = settled(DigitsNet(2), data)
    whole = compile_model(network, data, simd=False)
    return compile_model(network, data, simd=False, scheme=last_layers(whole.quantized.graph, 1))


def value(model: CompiledModel, fit: FitOptions) -> Valuation:
    data, labels = bars()
    candidates = value_candidates(model.quantized.graph, {"as given": model.scheme})
    return value_schemes(
        model, model.quantize_input(data), labels, candidates, fit, epochs=3, options=UpdateOptions(0.05)
    )


def test_candidates_go_from_what_is_given_to_everything(model: CompiledModel) -> None:
    found = value_candidates(model.quantized.graph, {"as given": model.scheme})
    assert list(found) == ["as given", "last 2 layers", "last 3 layers", "last 4 layers", "everything"]
    trained = [sum(update.rows > 0 for update in scheme.updates.values()) for scheme in found.values()]
    assert trained == sorted(trained) and trained[-1] == len(model.quantized.graph.weighted())


@pytest.mark.long
def test_what_is_measured_is_the_same_each_time_and_fits(model: CompiledModel) -> None:
    paged = FitOptions(RAM, page=PageMedium.PSRAM)
    first, second = value(model, paged), value(model, paged)
    assert [valued.accuracies for valued in first.valued] == [valued.accuracies for valued in second.valued]
    assert first.chosen.origin == second.chosen.origin and first.model.sha256 == second.model.sha256
    assert all(valued.fitted.memory.ram_bytes <= RAM for valued in first.valued)
    assert first.best.accuracy == max(valued.accuracy for valued in first.valued)
    whole = next(valued for valued in first.valued if valued.origin == "everything")
    assert whole.fitted.memory.paged and whole.job_joules == whole.fitted.joules * 60 * 3
    assert first.model.sha256 == recompile(first.model, paged)[0].sha256  # planned as --ram plans it


@pytest.mark.process
def test_a_candidate_that_does_not_fit_is_named(model: CompiledModel) -> None:
    found = value(model, FitOptions(4_000))
    assert [refused.origin for refused in found.refused][-1] == "everything"
    assert "budget is 4000 B" in found.refused[-1].reason
    with pytest.raises(ArenaBudgetError, match="budget is 300 B"):
        value(model, FitOptions(300))


def valued(model: CompiledModel, origin: str, joules: float, *accuracies: float) -> ValuedCandidate:
    fitted = recompile(model, FitOptions(1_000_000))[1]
    return ValuedCandidate(origin, SparseScheme({}), fitted, accuracies, joules, untrained=0.5)


def test_the_rule(model: CompiledModel) -> None:
    best = valued(model, "best", 4.0, 0.90, 0.92, 0.91)
    near = valued(model, "near", 2.0, 0.90, 0.90, 0.92)  # 0.3 ± 0.9 points behind
    poor = valued(model, "poor", 0.1, 0.80, 0.82, 0.81)  # most points per joule, but 10 points behind
    assert max_per_joule([best, near, poor], best) is near
    assert max_per_joule([best, poor], best) is best
    dear = valued(model, "expensive", 8.0, 0.90, 0.92, 0.91)
    assert max_per_joule([dear, best], best) is best
    assert near.gain_per_joule == pytest.approx((0.9067 - 0.5) / 2.0, abs=1e-4)
