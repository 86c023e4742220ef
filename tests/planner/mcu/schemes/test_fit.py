"""A model fitted to its task within its memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from port_planner.mcu.autodiff import SparseScheme
from port_planner.mcu.compile import compile_model
from port_planner.mcu.frontend import import_module
from port_planner.mcu.host import UpdateOptions, UpdateRounding
from port_planner.mcu.quantize import quantize
from port_planner.mcu.schemes.contributions import (
    Limits,
    analyse_contributions,
    find_scheme,
)
from port_planner.mcu.schemes.fit import EngineMeasure, fit_scheme
from port_planner.mcu.zoo import DigitsNet
from tests.planner.mcu.networks import bars, settled

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Begin each test with the same random weights, whatever ran before."""
    torch.manual_seed(1)


@pytest.mark.process
def test_analysis_measures_the_users_task() -> None:
    data, labels = bars()
    model = quantize(import_module(settled(DigitsNet(2), data), (1, 8, 8), "bars"), data)
    measure = EngineMeasure(model, model.quantize_input(data), labels, 8, UpdateOptions(0.1))
    table = analyse_contributions(model.graph, measure, layers=["head"], ratios=(0.5, 1.0), depth=2)
    assert set(table.bias_accuracy) == {1, 2}
    assert [c.rows for c in table.weights] == [1, 2]
    found = find_scheme(model.graph, table, Limits(20_000))
    measured = float(np.mean(measure(found.scheme, range(3))))
    assert measured > table.baseline + 0.1
    assert "predicted" in found.describe()
    assert len(table.lines()) == 5


def test_a_model_is_fitted_to_its_task_within_its_memory() -> None:
    data, labels = bars()
    model = compile_model(settled(DigitsNet(2), data), data, scheme=SparseScheme({}), simd=False)
    inference, seen = model.ram_bytes, []
    limits = Limits(inference + 2_500)
    fitted = fit_scheme(
        model,
        model.quantize_input(data),
        labels,
        limits,
        epochs=8,
        options=UpdateOptions(0.1),
        progress=lambda *p: seen.append(p),
    )
    assert fitted.model.ram_bytes == fitted.best.ram_bytes <= limits.ram_bytes
    assert not fitted.model.simd and fitted.model.scheme == fitted.best.scheme
    assert fitted.best.measured > fitted.table.baseline + 0.1
    assert fitted.optimum.scheme in [finalist.scheme for finalist in fitted.finalists]
    longest = max(len(finalist.accuracies) for finalist in fitted.finalists)
    rivals = [finalist.measured for finalist in fitted.finalists if len(finalist.accuracies) == longest]
    assert fitted.best.measured == max(rivals)
    counts = [done for done, _ in seen]
    assert counts == sorted(set(counts)) and seen[-1][0] == seen[-1][1]


def test_a_scheme_for_weights_with_low_bytes_counts_them() -> None:
    data, labels = bars()
    data, labels = data[:18], labels[:18]
    model = compile_model(settled(DigitsNet(2), data), data, scheme=SparseScheme({}), simd=False)
    limits, options = Limits(model.ram_bytes + 2_500), UpdateOptions(0.1, UpdateRounding.Q88)
    fitted = fit_scheme(model, model.quantize_input(data), labels, limits, epochs=1, options=options)
    assert fitted.best.ram_bytes == fitted.model.ram_bytes <= limits.ram_bytes
    assert fitted.model.q88 == any(update.rows for update in fitted.best.scheme.updates.values())
