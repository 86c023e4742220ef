"""The scheme search: exact against brute force, within budget, honest about what it predicts."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from port_planner.mcu.autodiff import LayerUpdate, SparseScheme, last_layers
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Graph, OpKind
from port_planner.mcu.memory import ArenaBudgetError, plan_memory
from port_planner.mcu.schemes.contributions import (
    Contribution,
    ContributionTable,
    Limits,
    backward_macs,
    find_scheme,
)
from port_planner.mcu.schemes.race import find_finalists
from port_planner.mcu.zoo import DigitsNet


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_module(DigitsNet().eval(), (1, 8, 8), "digits")


def random_table(graph: Graph, seed: int) -> ContributionTable:
    choose_ = random.Random(seed)
    layers = graph.weighted()[-3:]
    contributions = tuple(
        Contribution(op.name, rows, choose_.uniform(-0.02, 0.2))
        for op in layers
        for rows in (
            (op.out_shape.channels,)
            if op.kind.name == "DEPTHWISE"
            else (op.out_shape.channels // 4, op.out_shape.channels)
        )
    )
    return ContributionTable(0.2, {k: 0.2 + choose_.uniform(-0.01, 0.15) for k in range(1, 5)}, 4, contributions)


def brute_force(graph: Graph, table: ContributionTable, limits: Limits) -> float:
    """The best gain over every combination, each planned in full."""
    best = float("-inf")
    by_layer = {
        name: [c for c in table.weights if c.layer == name] for name in dict.fromkeys(c.layer for c in table.weights)
    }
    for depth in (0, *table.bias_accuracy):
        for picks in itertools.product(*([None, *options] for options in by_layer.values())):
            updates = dict(last_layers(graph, 0, biases=depth).updates)
            for pick in picks:
                if pick is not None:
                    updates[pick.layer] = LayerUpdate(updates.get(pick.layer, LayerUpdate()).bias, pick.rows)
            scheme = SparseScheme(updates)
            if (
                plan_memory(graph, scheme).ram_bytes <= limits.ram_bytes
                and backward_macs(graph, scheme) <= limits.mac_limit()
            ):
                gain = (table.bias_accuracy[depth] - table.baseline if depth else 0.0) + sum(
                    p.gain for p in picks if p is not None
                )
                best = max(best, gain)
    return best


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ram_bytes", [2000, 3500, 5000, 7000, 20000])
def test_the_choice_is_the_best_of_all(graph: Graph, seed: int, ram_bytes: int) -> None:
    table = random_table(graph, seed)
    limits = Limits(ram_bytes, backward_macs=None if seed % 2 else 60_000)
    found = find_scheme(graph, table, limits)
    assert found.proven
    assert found.ram_bytes == plan_memory(graph, found.scheme).ram_bytes <= ram_bytes
    assert found.predicted == pytest.approx(min(1.0, 0.2 + brute_force(graph, table, limits)))
    assert found.predicted == pytest.approx(table.predict(graph, found.scheme))


def test_predictions_between_measured_channel_counts_are_interpolated(graph: Graph) -> None:
    conv = graph.weighted()[-2].name
    weights = (Contribution(conv, 8, 0.1), Contribution(conv, 16, 0.3))
    table = ContributionTable(0.2, {1: 0.25, 2: 0.3}, 2, weights)
    gains = {rows: table.predict(graph, SparseScheme({conv: LayerUpdate(False, rows)})) for rows in (0, 4, 8, 12, 32)}
    assert gains == pytest.approx({0: 0.2, 4: 0.25, 8: 0.3, 12: 0.4, 32: 0.5})
    assert table.predict(graph, last_layers(graph, 0, biases=5)) == pytest.approx(0.3)  # no deeper than was measured


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ram_bytes", [2000, 5000, 7048])
def test_finalists_fit_are_distinct_and_leave_little(graph: Graph, seed: int, ram_bytes: int) -> None:
    table = replace(random_table(graph, seed), error=0.02)
    limits = Limits(ram_bytes, backward_macs=None if seed % 2 else 80_000)
    field = find_finalists(graph, table, limits)
    optimum = find_scheme(graph, table, limits)
    assert field[0].scheme == optimum.scheme and field[0].predicted == pytest.approx(optimum.predicted)
    assert len({f.scheme.describe() for f in field}) == len(field)
    for finalist in field:
        assert finalist.ram_bytes == plan_memory(graph, finalist.scheme).ram_bytes <= ram_bytes
        assert finalist.backward_macs == backward_macs(graph, finalist.scheme) <= limits.mac_limit()
    fitting = [k for k in range(1, 7) if _fits(graph, last_layers(graph, k), limits)]
    schemes = [f.scheme for f in field]
    assert not fitting or last_layers(graph, max(fitting)) in schemes
    deeper = [op for op in graph.weighted()[-3:] if max(c.gain for c in table.by_layer[op.name]) > 0]
    for finalist in field:
        if finalist.origin.endswith("filled"):
            for op in deeper:
                most = max(table.by_layer[op.name], key=lambda c: c.gain).rows
                now = finalist.scheme.of(op.name)
                more = SparseScheme({**finalist.scheme.updates, op.name: LayerUpdate(now.bias, now.rows + 1)})
                assert now.rows >= most or op.kind is OpKind.DEPTHWISE or not _fits(graph, more, limits)


def _fits(graph: Graph, scheme: SparseScheme, limits: Limits) -> bool:
    in_time = backward_macs(graph, scheme) <= limits.mac_limit()
    return in_time and plan_memory(graph, scheme).ram_bytes <= limits.ram_bytes


def test_time_and_energy_limits_are_in_macs() -> None:
    assert Limits(1, step_seconds=0.5, seconds_per_mac=1e-6).mac_limit() == pytest.approx(5e5)
    assert Limits(1, step_joules=1e-3, joules_per_mac=1e-8, backward_macs=70_000).mac_limit() == 70_000
    assert Limits(1).mac_limit() == float("inf")


def test_no_room_for_inference_is_an_error(graph: Graph) -> None:
    with pytest.raises(ArenaBudgetError, match="budget is 100 B"):
        find_scheme(graph, random_table(graph, 0), Limits(100))
