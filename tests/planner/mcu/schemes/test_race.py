"""The race of finalists: draws go to the better half, gains are paired."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from port_planner.mcu.autodiff import LayerUpdate, SparseScheme, last_layers
from port_planner.mcu.compile import compile_quantized
from port_planner.mcu.frontend import import_module
from port_planner.mcu.host import HostEngine
from port_planner.mcu.ir import Graph
from port_planner.mcu.quantize import quantize
from port_planner.mcu.schemes.contributions import (
    analyse_contributions,
)
from port_planner.mcu.schemes.fit import EngineMeasure
from port_planner.mcu.schemes.race import Finalist, race, race_draws
from port_planner.mcu.zoo import DigitsNet
from tests.planner.mcu.networks import settled


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_module(DigitsNet().eval(), (1, 8, 8), "digits")


def bars() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Noise, and in every other sample a bright left half; a network that has learnt nothing yet can learn it."""
    labels = np.arange(60) % 2
    data = np.random.default_rng(0).random((60, 1, 8, 8), np.float32) * 0.2
    data[labels == 1, :, :4] += 0.8
    return data, labels


def test_the_race_spends_its_draws_on_the_better_half() -> None:
    field = [Finalist(str(i), SparseScheme({str(i): LayerUpdate(True)}), 0.5, 100, 10) for i in range(6)]
    asked: list[tuple[str, tuple[int, ...]]] = []

    def measure(scheme: SparseScheme, draws: Sequence[int]) -> list[float]:
        (name,) = scheme.updates
        asked.append((name, tuple(draws)))
        return [0.1 * int(name) + (0.05 if draw % 2 else -0.05) for draw in draws]

    ranking = race(field, measure, draws=2, rounds=3)
    assert [f.origin for f in ranking] == ["5", "4", "3", "2", "1", "0"]
    assert [len(f.accuracies) for f in ranking] == [8, 8, 4, 2, 2, 2]
    assert ranking[0].measured == pytest.approx(0.5)
    assert asked[-2:] == [("5", (4, 5, 6, 7)), ("4", (4, 5, 6, 7))]
    assert sum(len(draws) for _, draws in asked) == race_draws(6, draws=2, rounds=3)


def test_gains_are_paired_and_their_error_is_pooled(graph: Graph) -> None:
    """Draws differ much, the gain within a draw little: 0.01, 0.02 and 0.03, whose standard error is 0.01 / sqrt(3)."""
    trained = lambda scheme: any(update.rows for update in scheme.updates.values())  # noqa: E731

    def measure(scheme: SparseScheme, draws: Sequence[int]) -> list[float]:
        return [0.2 * draw + (0.01 * (draw + 1) if trained(scheme) else 0.0) for draw in draws]

    table = analyse_contributions(graph, measure, layers=["head"], depth=1, draws=3)
    assert [c.gain for c in table.weights] == pytest.approx([0.02] * len(table.weights))
    assert table.error == pytest.approx(0.01 / 3**0.5)
    assert table.optimistic().weights[0].gain == pytest.approx(0.02 + table.error)
    assert analyse_contributions(graph, measure, layers=["head"], depth=1, draws=1).error == 0.0


@pytest.mark.process
def test_as_many_draws_as_folds_judge_every_sample_once() -> None:
    data, labels = bars()
    model = quantize(import_module(settled(DigitsNet(2), data), (1, 8, 8), "bars"), data)
    inputs = model.quantize_input(data)
    measure = EngineMeasure(model, inputs, labels, folds=4)
    whole = HostEngine(compile_quantized(model, scheme=SparseScheme({}))).evaluate(inputs, labels)[1]
    for draws in (range(4), range(4, 8)):
        assert np.mean(measure(SparseScheme({}), draws)) == pytest.approx(whole)
    head = last_layers(model.graph, 1)
    assert measure(head, (1, 5)) == [*measure(head, (1,)), *measure(head, (5,))]  # each draw starts afresh
