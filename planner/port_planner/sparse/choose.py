"""Which parameters to train if not all of them fit.

This combines contribution analysis with an exact choice under a budget.

The analysis is that of arXiv 2206.15472 section 2.3: measure what training the biases of the last k layers gains, and
what each layer's weights gain on top, and add the gains up. The choice is ours: the paper searches by evolution over an
assumed memory model, `choose` solves the multiple-choice knapsack exactly over whatever the real planner says.

Works for any torch module through names and callbacks; planner/port_planner/mcu/schemes/contributions.py uses the same
search for microcontrollers. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Selection = tuple[int, ...]
"""One entry per item: the index of the chosen option, or -1 for none."""

NODE_LIMIT = 2_000_000


@dataclass(frozen=True, slots=True)
class Option:
    """One option for an item: its gain, and the least that it adds to the cost for any other choices."""

    gain: float
    min_cost: float = 0.0


@dataclass(frozen=True)
class ChoiceProblem:
    """A multiple-choice knapsack whose cost is a function instead of a sum.

    `cost(selection)` is the real cost; `bound(selection)` must not exceed the cost of the selection or of any that adds
    to it. Items with no option chosen are -1.
    """

    items: tuple[tuple[Option, ...], ...]
    budget: float
    cost: Callable[[Selection], float]
    bound: Callable[[Selection], float]

    @cached_property
    def steps(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each depth, the (gain, least cost) steps of the items that are still open, best value per cost first."""
        return tuple(
            tuple(sorted((s for item in self.items[depth:] for s in _hull(item)), key=_by_efficiency))
            for depth in range(len(self.items) + 1)
        )


def _by_efficiency(step: tuple[float, float]) -> float:
    gain, cost = step
    return -gain / cost if cost > 0 else float("-inf")


def _hull(item: Sequence[Option]) -> list[tuple[float, float]]:
    """Return the steps of the upper hull over (cost, gain).

    It relaxes "one option or none" to fractions.
    """
    points = sorted([(0.0, 0.0), *((max(0.0, o.min_cost), o.gain) for o in item if o.gain > 0)])
    hull: list[tuple[float, float]] = []
    for cost, gain in points:
        if hull and gain <= hull[-1][1]:
            continue
        while hull and cost == hull[-1][0]:
            hull.pop()
        while len(hull) > 1 and _cross(hull[-2], hull[-1], (cost, gain)) >= 0:
            hull.pop()
        hull.append((cost, gain))
    start = (0.0, 0.0)
    steps = []
    for cost, gain in hull:
        if gain > start[1]:
            steps.append((gain - start[1], cost - start[0]))
        start = (cost, gain)
    return steps


def _cross(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


@dataclass(frozen=True, slots=True)
class SparseChoice:
    """The best selection found, its gain and cost, and whether it is proved to be the best."""

    selection: Selection
    gain: float
    cost: float
    proven: bool


def choose(problem: ChoiceProblem, node_limit: int = NODE_LIMIT) -> SparseChoice | None:
    """Return the selection with the largest gain within the budget; None if even the empty one exceeds it."""
    found = choose_best(problem, 1, node_limit)
    return found[0] if found else None


def choose_best(problem: ChoiceProblem, count: int, node_limit: int = NODE_LIMIT) -> tuple[SparseChoice, ...]:
    """Return the `count` selections with the largest gains within the budget, best first.

    Options without gain are left out.

    Depth-first branch and bound; the bound on the gain is the fractional relaxation over `min_cost`.
    """
    empty: Selection = (-1,) * len(problem.items)
    search = _Search(problem, count, node_limit)
    search.offer(empty, 0.0)
    search.visit(0, empty, 0.0)
    proven = search.nodes <= node_limit
    return tuple(SparseChoice(selection, gain, cost, proven) for gain, cost, selection in search.best)


class _Search:
    def __init__(self, problem: ChoiceProblem, count: int, node_limit: int) -> None:
        self.problem = problem
        self.count = count
        self.node_limit = node_limit
        self.nodes = 0
        self.best: list[tuple[float, float, Selection]] = []
        """(gain, cost, selection) of the largest gains so far, best first."""

    def visit(self, depth: int, selection: Selection, gain: float) -> None:
        self.nodes += 1
        if self.nodes > self.node_limit:
            return
        floor = self.problem.bound(selection)
        if (
            floor > self.problem.budget
            or gain + self._relaxed(depth, self.problem.budget - floor) <= self._gain_to_beat()
        ):
            return
        if depth == len(self.problem.items):
            self.offer(selection, gain)
            return
        options = self.problem.items[depth]
        for index in sorted(range(len(options)), key=lambda i: -options[i].gain):
            if options[index].gain > 0:
                taken = (*selection[:depth], index, *selection[depth + 1 :])
                self.visit(depth + 1, taken, gain + options[index].gain)
        self.visit(depth + 1, selection, gain)

    def _relaxed(self, depth: int, budget: float) -> float:
        total = 0.0
        for gain, cost in self.problem.steps[depth]:
            if cost > budget:
                return total + (gain * budget / cost if cost > 0 else 0.0)
            total += gain
            budget -= cost
        return total

    def _gain_to_beat(self) -> float:
        return self.best[-1][0] if len(self.best) == self.count else float("-inf")

    def offer(self, selection: Selection, gain: float) -> None:
        if gain <= self._gain_to_beat() or any(selection == known for _, _, known in self.best):
            return
        cost = self.problem.cost(selection)
        if cost <= self.problem.budget:
            self.best.append((gain, cost, selection))
            self.best.sort(key=lambda found: -found[0])
            del self.best[self.count :]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of any model: the names of its weights and of its biases, as `named_parameters` gives them."""

    name: str
    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()


def layers_of(parameter_names: Sequence[str]) -> tuple[Layer, ...]:
    """Return the layers of a model from its parameter names in execution order: one per owning module.

    A name ending in `bias` is a bias; everything else of the module counts as its weights.
    """
    grouped: dict[str, tuple[list[str], list[str]]] = {}
    for name in parameter_names:
        owner, _, leaf = name.rpartition(".")
        weights, biases = grouped.setdefault(owner, ([], []))
        (biases if leaf.endswith("bias") else weights).append(name)
    return tuple(Layer(owner or "model", tuple(w), tuple(b)) for owner, (w, b) in grouped.items())


@dataclass(frozen=True, slots=True)
class Contributions:
    """Measured scores: of the untrained model, with the biases of the last k layers, and with each
    layer's weights in addition.

    `weight_score[i]` was measured with the biases of the last `reference_depth` layers and the weights of layer i.
    """

    layers: tuple[Layer, ...]
    baseline: float
    bias_score: Mapping[int, float]
    weight_score: Mapping[int, float]
    reference_depth: int

    def bias_gain(self, depth: int) -> float:
        """Return the gain of training the biases of the last `depth` layers."""
        return self.bias_score[depth] - self.baseline

    def weight_gain(self, layer: int) -> float:
        """Return the additional gain of a layer's weights beyond the reference biases."""
        return self.weight_score[layer] - self.bias_score.get(self.reference_depth, self.baseline)


@dataclass(frozen=True, slots=True)
class TrainableChoice:
    """The parameters to train, with their predicted score and needs, and the measured score."""

    parameters: frozenset[str]
    predicted: float
    measured: float
    needed_bytes: int
    proven: bool


def analyse(layers: Sequence[Layer], measure: Callable[[frozenset[str]], float]) -> Contributions:
    """Return the contributions of every layer.

    `measure(names)` trains only these and returns a score, higher is better.

    Costs one short training per layer for the biases and one per layer for the weights. Layers without biases are
    measured by their weights alone.
    """
    with_bias = [i for i, layer in enumerate(layers) if layer.biases]
    bias_score = {k: measure(_biases(layers, k)) for k in range(1, len(layers) + 1) if len(layers) - k in with_bias}
    reference = max(bias_score, default=0)
    base = _biases(layers, reference)
    weight_score = {i: measure(base | frozenset(layer.weights)) for i, layer in enumerate(layers) if layer.weights}
    return Contributions(tuple(layers), measure(frozenset()), bias_score, weight_score, reference)


def _biases(layers: Sequence[Layer], depth: int) -> frozenset[str]:
    return frozenset(name for layer in (layers[-depth:] if depth else ()) for name in layer.biases)


def choose_trainable(
    contributions: Contributions,
    bytes_of: Callable[[frozenset[str]], int],
    budget_bytes: int,
    measure: Callable[[frozenset[str]], float],
    node_limit: int = 20_000,
    allowed: Callable[[frozenset[str]], bool] = lambda names: True,
) -> TrainableChoice | None:
    """Return the parameters to train within `budget_bytes`, or None when not even inference fits.

    `bytes_of(names)` returns the planner's figure for a set of trained parameters; training more must never need less.
    It is called once per set. `allowed(names)` checks other conditions, such as the time of a step; if a set is not
    allowed, no superset of it may be.
    """
    layers = contributions.layers
    depths = sorted(contributions.bias_score)
    targets = sorted(contributions.weight_score)
    items = (
        tuple(Option(contributions.bias_gain(k)) for k in depths),
        *((Option(contributions.weight_gain(i)),) for i in targets),
    )
    known: dict[frozenset[str], float] = {}

    def names(selection: Selection) -> frozenset[str]:
        chosen = _biases(layers, depths[selection[0]]) if selection[0] >= 0 else frozenset()
        return chosen.union(*(layers[i].weights for i, taken in zip(targets, selection[1:], strict=True) if taken >= 0))

    def cost(selection: Selection) -> float:
        trained = names(selection)
        if trained not in known:
            known[trained] = bytes_of(trained) if allowed(trained) else float("inf")
        return known[trained]

    best = choose(ChoiceProblem(items, budget_bytes, cost, cost), node_limit)
    if best is None:
        return None
    trained = names(best.selection)
    return TrainableChoice(trained, contributions.baseline + best.gain, measure(trained), int(best.cost), best.proven)
