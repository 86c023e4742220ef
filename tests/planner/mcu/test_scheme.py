"""The scheme search: exact against brute force, within budget, honest about what it predicts."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from planner.mcu.autodiff import LayerUpdate, SparseScheme, last_layers
from planner.mcu.compile import ArenaBudgetError, compile_model, compile_quantized
from planner.mcu.frontend import import_module
from planner.mcu.host import HostEngine, UpdateOptions
from planner.mcu.ir import Graph, OpKind
from planner.mcu.memory import plan_memory
from planner.mcu.quantize import quantize
from planner.mcu.scheme import (
    Contribution,
    ContributionTable,
    Limits,
    analyse_contributions,
    backward_macs,
    find_scheme,
)
from planner.mcu.scheme_fit import EngineMeasure, fit_scheme
from planner.mcu.scheme_race import Finalist, find_finalists, race, race_draws
from planner.mcu.zoo import DigitsNet
from planner.sparse.choose import ChoiceProblem, Option, SparseChoice, choose, choose_best
from tests.planner.mcu.networks import settled


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


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
    assert found.predicted == pytest.approx(table.predict(graph, found.scheme))


def test_predictions_between_measured_channel_counts_are_interpolated(graph):
    conv = graph.weighted()[-2].name
    weights = (Contribution(conv, 8, 0.1), Contribution(conv, 16, 0.3))
    table = ContributionTable(0.2, {1: 0.25, 2: 0.3}, 2, weights)
    gains = {rows: table.predict(graph, SparseScheme({conv: LayerUpdate(False, rows)})) for rows in (0, 4, 8, 12, 32)}
    assert gains == pytest.approx({0: 0.2, 4: 0.25, 8: 0.3, 12: 0.4, 32: 0.5})
    assert table.predict(graph, last_layers(graph, 0, biases=5)) == pytest.approx(0.3)  # no deeper than was measured


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ram_bytes", [2000, 5000, 7048])
def test_finalists_fit_are_distinct_and_leave_little(graph, seed, ram_bytes):
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


def test_the_race_spends_its_draws_on_the_better_half():
    field = [Finalist(str(i), SparseScheme({str(i): LayerUpdate(True)}), 0.5, 100, 10) for i in range(6)]
    asked: list[tuple[str, tuple[int, ...]]] = []

    def measure(scheme, draws):
        (name,) = scheme.updates
        asked.append((name, tuple(draws)))
        return [0.1 * int(name) + (0.05 if draw % 2 else -0.05) for draw in draws]

    ranking = race(field, measure, draws=2, rounds=3)
    assert [f.origin for f in ranking] == ["5", "4", "3", "2", "1", "0"]
    assert [len(f.accuracies) for f in ranking] == [8, 8, 4, 2, 2, 2]
    assert ranking[0].measured == pytest.approx(0.5)
    assert asked[-2:] == [("5", (4, 5, 6, 7)), ("4", (4, 5, 6, 7))]
    assert sum(len(draws) for _, draws in asked) == race_draws(6, draws=2, rounds=3)


def test_gains_are_paired_and_their_error_is_pooled(graph):
    """Draws differ much, the gain within a draw little: 0.01, 0.02 and 0.03, whose standard error is 0.01 / sqrt(3)."""
    trained = lambda scheme: any(update.rows for update in scheme.updates.values())  # noqa: E731

    def measure(scheme, draws):
        return [0.2 * draw + (0.01 * (draw + 1) if trained(scheme) else 0.0) for draw in draws]

    table = analyse_contributions(graph, measure, layers=["head"], depth=1, draws=3)
    assert [c.gain for c in table.weights] == pytest.approx([0.02] * len(table.weights))
    assert table.error == pytest.approx(0.01 / 3**0.5)
    assert table.optimistic().weights[0].gain == pytest.approx(0.02 + table.error)
    assert analyse_contributions(graph, measure, layers=["head"], depth=1, draws=1).error == 0.0


def test_time_and_energy_limits_are_in_macs():
    assert Limits(1, step_seconds=0.5, seconds_per_mac=1e-6).mac_limit() == pytest.approx(5e5)
    assert Limits(1, step_joules=1e-3, joules_per_mac=1e-8, backward_macs=70_000).mac_limit() == 70_000
    assert Limits(1).mac_limit() == float("inf")


def test_no_room_for_inference_is_an_error(graph):
    with pytest.raises(ArenaBudgetError, match="budget is 100 B"):
        find_scheme(graph, random_table(graph, 0), Limits(100))


def test_compiling_over_budget_says_by_how_much(graph):
    model = quantize(graph, np.random.default_rng(0).random((4, 1, 8, 8), np.float32))
    needed = compile_quantized(model).ram_bytes
    with pytest.raises(ArenaBudgetError) as raised:
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
    assert isinstance(found, SparseChoice) and found.proven
    assert found.gain == pytest.approx(max(gains))
    assert found.cost == cost(found.selection) <= budget
    several = choose_best(ChoiceProblem(items, budget, cost, cost), 3)
    assert len({choice.selection for choice in several}) == len(several) and several[0].gain == found.gain
    gaining = itertools.product(*((-1, *(k for k, o in enumerate(item) if o.gain > 0)) for item in items))
    best = sorted(sum(items[i][k].gain for i, k in enumerate(s) if k >= 0) for s in gaining if cost(s) <= budget)
    assert [choice.gain for choice in several] == pytest.approx(best[::-1][:3])


def test_a_search_cut_short_says_so():
    items = tuple((Option(1.0 + i / 10, 3.0),) for i in range(12))
    found = choose(ChoiceProblem(items, 18.0, lambda s: 3.1 * sum(k >= 0 for k in s), lambda s: 0.0), node_limit=30)
    assert found is not None and not found.proven
    assert found.cost <= 18.0


def bars() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Noise, and in every other sample a bright left half; a network that has learnt nothing yet can learn it."""
    labels = np.arange(60) % 2
    data = np.random.default_rng(0).random((60, 1, 8, 8), np.float32) * 0.2
    data[labels == 1, :, :4] += 0.8
    return data, labels


def test_analysis_measures_the_users_task():
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


def test_as_many_draws_as_folds_judge_every_sample_once():
    data, labels = bars()
    model = quantize(import_module(settled(DigitsNet(2), data), (1, 8, 8), "bars"), data)
    inputs = model.quantize_input(data)
    measure = EngineMeasure(model, inputs, labels, folds=4)
    whole = HostEngine(compile_quantized(model, scheme=SparseScheme({}))).evaluate(inputs, labels)[1]
    for draws in (range(4), range(4, 8)):
        assert np.mean(measure(SparseScheme({}), draws)) == pytest.approx(whole)
    head = last_layers(model.graph, 1)
    assert measure(head, (1, 5)) == [*measure(head, (1,)), *measure(head, (5,))]  # each draw starts afresh


def test_a_model_is_fitted_to_its_task_within_its_memory():
    data, labels = bars()
    model = compile_model(settled(DigitsNet(2), data), data, scheme=SparseScheme({}), simd=False)
    inference, seen = model.ram_bytes, []
    limits = Limits(inference + 2_500)
    fitted = fit_scheme(
        model, model.quantize_input(data), labels, limits, epochs=8, options=UpdateOptions(0.1),
        progress=lambda *p: seen.append(p),
    )  # fmt: skip
    assert fitted.model.ram_bytes == fitted.best.ram_bytes <= limits.ram_bytes
    assert not fitted.model.simd and fitted.model.scheme == fitted.best.scheme
    assert fitted.best.measured > fitted.table.baseline + 0.1
    assert fitted.optimum.scheme in [finalist.scheme for finalist in fitted.finalists]
    longest = max(len(finalist.accuracies) for finalist in fitted.finalists)
    rivals = [finalist.measured for finalist in fitted.finalists if len(finalist.accuracies) == longest]
    assert fitted.best.measured == max(rivals)
    counts = [done for done, _ in seen]
    assert counts == sorted(set(counts)) and seen[-1][0] == seen[-1][1]
