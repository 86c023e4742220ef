"""The scheme search: exact against brute force, within budget, honest about what it predicts."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.mcu.autodiff import LayerUpdate, SparseScheme, last_layers
from planner.mcu.compile import BudgetError, compile_model, compile_quantized
from planner.mcu.frontend import import_module
from planner.mcu.ir import Graph
from planner.mcu.memory import plan_memory
from planner.mcu.quantize import quantize
from planner.mcu.scheme import (
    Contribution,
    ContributionTable,
    EngineMeasure,
    Limits,
    analyse_contributions,
    backward_macs,
    find_scheme,
    fit_scheme,
)
from planner.mcu.zoo import DigitsNet
from planner.sparse_update import Choice, ChoiceProblem, Option, choose
from tests.planner.mcu.networks import settled


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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ram_bytes", [2000, 3500, 5000, 7000, 20000])
def test_the_choice_is_the_best_of_all(graph, seed, ram_bytes):
    table = random_table(graph, seed)
    limits = Limits(ram_bytes, backward_macs=None if seed % 2 else 60_000)
    found = find_scheme(graph, table, limits)
    assert found.proven
    assert found.ram_bytes == plan_memory(graph, found.scheme).ram_bytes <= ram_bytes
    assert found.predicted == pytest.approx(min(1.0, 0.2 + brute_force(graph, table, limits)))


def test_time_and_energy_limits_are_in_macs():
    assert Limits(1, step_seconds=0.5, seconds_per_mac=1e-6).mac_limit() == pytest.approx(5e5)
    assert Limits(1, step_joules=1e-3, joules_per_mac=1e-8, backward_macs=70_000).mac_limit() == 70_000
    assert Limits(1).mac_limit() == float("inf")


def test_no_room_for_inference_is_an_error(graph):
    with pytest.raises(BudgetError, match="budget is 100 B"):
        find_scheme(graph, random_table(graph, 0), Limits(100))


def test_compiling_over_budget_says_by_how_much(graph):
    model = quantize(graph, np.random.default_rng(0).random((4, 1, 8, 8), np.float32))
    needed = compile_quantized(model).ram_bytes
    with pytest.raises(BudgetError) as raised:
        compile_quantized(model, budget=needed - 1)
    assert raised.value.needed_bytes == needed
    assert compile_quantized(model, budget=needed).ram_bytes == needed


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.floats(-1, 5), st.integers(0, 9)), min_size=1, max_size=3), min_size=1, max_size=5),
    st.integers(0, 25),
    st.integers(0, 6),
)
def test_the_search_equals_brute_force_on_random_problems(rows, budget, step):
    """Costs that do not add up: every started pair of chosen items costs `step` more."""
    items = tuple(tuple(Option(gain, cost) for gain, cost in item) for item in rows)

    def cost(selection):
        taken = [items[i][k].least_cost for i, k in enumerate(selection) if k >= 0]
        return sum(taken) + step * -(-len(taken) // 2)

    found = choose(ChoiceProblem(items, budget, cost, cost))
    everything = itertools.product(*(range(-1, len(item)) for item in items))
    gains = [sum(items[i][k].gain for i, k in enumerate(s) if k >= 0) for s in everything if cost(s) <= budget]
    assert isinstance(found, Choice) and found.proven
    assert found.gain == pytest.approx(max(gains))
    assert found.cost == cost(found.selection) <= budget


def test_a_search_cut_short_says_so():
    items = tuple((Option(1.0 + i / 10, 3.0),) for i in range(12))
    found = choose(ChoiceProblem(items, 18.0, lambda s: 3.1 * sum(k >= 0 for k in s), lambda s: 0.0), node_limit=30)
    assert found is not None and not found.proven
    assert found.cost <= 18.0


def test_analysis_measures_the_users_task():
    """Bars on the left against bars on the right, mirrored after pretraining on nothing: the head alone can learn it."""
    draw = np.random.default_rng(0)
    labels = np.arange(60) % 2
    data = draw.random((60, 1, 8, 8), np.float32) * 0.2
    for sample, label in zip(data, labels, strict=True):
        sample[0, :, :4] += 0.8 * (1 - label)
        sample[0, :4, :] += 0.8 * label
    model = quantize(import_module(settled(DigitsNet(2), data), (1, 8, 8), "bars"), data)
    inputs = model.quantize_input(data)
    measure = EngineMeasure(model, inputs[:40], labels[:40], inputs[40:], labels[40:], epochs=3, seeds=(0,))
    table = analyse_contributions(model.graph, measure, layers=["head"], ratios=(0.5, 1.0), depth=2)
    assert set(table.bias_accuracy) == {1, 2}
    assert [c.rows for c in table.weights] == [1, 2]
    found = find_scheme(model.graph, table, Limits(20_000))
    assert measure(found.scheme) >= table.baseline
    assert "predicted" in found.describe(measure(found.scheme))
    assert len(table.lines()) == 5


def test_a_model_is_fitted_to_its_task_within_its_memory():
    draw = np.random.default_rng(0)
    labels = np.arange(60) % 2
    data = draw.random((60, 1, 8, 8), np.float32) * 0.2
    data[labels == 1, :, :4] += 0.8
    model = compile_model(settled(DigitsNet(2), data), data, scheme=SparseScheme({}), simd=False)
    inference, seen = model.ram_bytes, []
    limits = Limits(inference + 2_500)
    fitted = fit_scheme(model, model.quantize_input(data), labels, limits, epochs=1, progress=lambda *p: seen.append(p))
    assert fitted.model.ram_bytes == fitted.choice.ram_bytes <= limits.ram_bytes
    assert not fitted.model.simd and fitted.model.scheme == fitted.choice.scheme
    assert fitted.measured >= fitted.table.baseline
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1)) and seen[-1][0] == seen[-1][1]
