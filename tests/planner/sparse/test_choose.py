"""Contribution analysis for any torch model: parameter names in, the set to train out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from port_planner.sparse.choose import (
    ChoiceProblem,
    Contributions,
    Layer,
    Option,
    SparseChoice,
    analyse,
    choose,
    choose_best,
    choose_trainable,
    layers_of,
)

NAMES = ["stem.weight", "stem.bias", "norm.weight", "norm.bias", "body.conv.weight", "head.weight", "head.bias"]


def test_layers_are_found_in_order() -> None:
    assert layers_of(NAMES) == (
        Layer("stem", ("stem.weight",), ("stem.bias",)),
        Layer("norm", ("norm.weight",), ("norm.bias",)),
        Layer("body.conv", ("body.conv.weight",), ()),
        Layer("head", ("head.weight",), ("head.bias",)),
    )


SCORES = {
    "stem.weight": 0.02,
    "norm.weight": 0.01,
    "body.conv.weight": 0.2,
    "head.weight": 0.15,
    "stem.bias": 0.01,
    "norm.bias": 0.05,
    "head.bias": 0.04,
}
SIZES = {
    "stem.weight": 30,
    "norm.weight": 8,
    "body.conv.weight": 100,
    "head.weight": 40,
    "stem.bias": 4,
    "norm.bias": 4,
    "head.bias": 4,
}


def score(names: frozenset[str]) -> float:
    return 0.3 + sum(SCORES[name] for name in names)


def needed(names: frozenset[str]) -> int:
    """Parameters plus activations kept from the first trained layer on."""
    depth = max((len(NAMES) - NAMES.index(name) for name in names), default=0)
    return 50 + 20 * depth + sum(SIZES[name] for name in names)


def test_gains_are_measured_over_the_same_biases() -> None:
    table = analyse(layers_of(NAMES), score)
    assert table.baseline == pytest.approx(0.3)
    assert table.bias_gain(1) == pytest.approx(0.04)
    assert table.bias_gain(4) == pytest.approx(0.10)
    assert 2 not in table.bias_score  # body.conv has no bias: depth 2 would repeat depth 1
    assert table.weight_gain(2) == pytest.approx(0.2)


@pytest.mark.parametrize("budget", [49, 50, 120, 200, 300, 340, 1000])
def test_the_set_is_the_best_that_fits(budget: int) -> None:
    layers = layers_of(NAMES)
    table = analyse(layers, score)
    found = choose_trainable(table, needed, budget, score)
    if budget < 50:
        assert found is None
        return
    best = max(
        score(names)
        for depth in (0, *table.bias_score)
        for count in range(5)
        for picked in itertools.combinations(layers, count)
        if needed(names := _names(layers, depth, picked)) <= budget
    )
    assert found is not None and found.proven
    assert found.needed_bytes == needed(found.parameters) <= budget
    assert found.predicted == pytest.approx(best)
    assert found.measured == pytest.approx(best)


def _names(layers: tuple[Layer, ...], depth: int, picked: tuple[Layer, ...]) -> frozenset[str]:
    biases = {b for layer in (layers[-depth:] if depth else ()) for b in layer.biases}
    return frozenset(biases | {w for layer in picked for w in layer.weights})


def test_a_model_without_biases_is_measured_by_its_weights() -> None:
    table = analyse(layers_of(["a.weight", "b.weight"]), lambda names: 0.5 + 0.1 * len(names))
    assert isinstance(table, Contributions)
    assert table.bias_score == {} and table.reference_depth == 0
    found = choose_trainable(table, lambda names: 10 * len(names), 10, lambda names: 0.5 + 0.1 * len(names))
    assert found is not None and len(found.parameters) == 1


def test_what_is_not_allowed_is_not_chosen() -> None:
    table = analyse(layers_of(NAMES), score)
    allowed = lambda names: len(names) <= 2  # noqa: E731
    found = choose_trainable(table, needed, 1000, score, allowed=allowed)
    assert found is not None and len(found.parameters) == 2 and found.proven
    assert found.parameters == {"body.conv.weight", "head.weight"}


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.floats(-1, 5), st.integers(0, 9)), min_size=1, max_size=3), min_size=1, max_size=5),
    st.integers(0, 25),
    st.integers(0, 6),
)
def test_the_search_equals_brute_force_on_random_problems(
    rows: list[list[tuple[float, int]]], budget: int, step: int
) -> None:
    """Costs that do not add up: every started pair of chosen items costs `step` more."""
    items = tuple(tuple(Option(gain, cost) for gain, cost in item) for item in rows)

    def cost(selection: Sequence[int]) -> float:
        taken = [items[i][k].min_cost for i, k in enumerate(selection) if k >= 0]
        return sum(taken) + step * -(-len(taken) // 2)

    found = choose(ChoiceProblem(items, budget, cost, cost))
    everything = itertools.product(*(range(-1, len(item)) for item in items))
    gains = [sum(items[i][k].gain for i, k in enumerate(s) if k >= 0) for s in everything if cost(s) <= budget]
    assert isinstance(found, SparseChoice) and found.proven
    assert found.gain == pytest.approx(max(gains))
    assert found.cost == cost(found.selection) <= budget
    several = choose_best(ChoiceProblem(items, budget, cost, cost), 3)
    assert len({choice.selection for choice in several}) == len(several)
    assert several[0].gain == pytest.approx(
        found.gain
    )  # of two with the same gains, sums round in the order of the items
    gaining = itertools.product(*((-1, *(k for k, o in enumerate(item) if o.gain > 0)) for item in items))
    best = sorted(sum(items[i][k].gain for i, k in enumerate(s) if k >= 0) for s in gaining if cost(s) <= budget)
    assert [choice.gain for choice in several] == pytest.approx(best[::-1][:3])


def test_a_search_cut_short_says_so() -> None:
    items = tuple((Option(1.0 + i / 10, 3.0),) for i in range(12))
    found = choose(ChoiceProblem(items, 18.0, lambda s: 3.1 * sum(k >= 0 for k in s), lambda s: 0.0), node_limit=30)
    assert found is not None and not found.proven
    assert found.cost <= 18.0
