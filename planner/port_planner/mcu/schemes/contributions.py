"""Find the sparse update by measurement: contribution analysis, and an exact choice over the planner's real bytes.

arXiv 2206.15472 section 2.3 with two differences. The gains are measured on the user's own task with the firmware's
engine. The choice is exact (`port_planner.sparse.choose.choose_best`) over the arena and parameter bytes that this
compiler really plans, not an evolutionary search over an assumed memory model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from port_planner.mcu.arena import aligned, lower_bound
from port_planner.mcu.autodiff import LayerUpdate, SparseScheme, StepKind, last_layers, rows_at, training_program
from port_planner.mcu.ir import Graph, row_bytes
from port_planner.mcu.memory import ArenaBudgetError, buffers_of, parameter_layout, plan_memory
from port_planner.sparse.choose import ChoiceProblem, Option, Selection, SparseChoice, choose

RATIOS = (0.125, 0.25, 0.5, 1.0)

DRAWS = 3
"""Adaptations per scheme of the analysis, and of the first round of the race."""

Measure = Callable[[SparseScheme, Sequence[int]], Sequence[float]]
"""Accuracies after a short adaptation with this scheme, in [0, 1], one per draw.

A draw determines the samples for training and evaluation, and their order. Equal draws are equal for every scheme, so
that differences between schemes are paired.
"""


@dataclass(frozen=True, slots=True)
class Contribution:
    """The gain of training the weights of `rows` channels of `layer`, over the same biases without it."""

    layer: str
    rows: int
    gain: float


@dataclass(frozen=True, slots=True)
class ContributionTable:
    """Measured accuracies: untrained, with the biases of the last k layers for each k, and the
    gain of every weight choice.

    `error` is the standard error of a weight choice's gain, pooled over all of them.
    """

    baseline: float
    bias_accuracy: dict[int, float]
    reference_depth: int
    weights: tuple[Contribution, ...]
    error: float = 0.0

    def lines(self) -> list[str]:
        """Return the table as text, in points of accuracy."""
        text = [f"not trained: {100 * self.baseline:.1f} %"]
        for depth, accuracy in self.bias_accuracy.items():
            text.append(f"biases of the last {depth}: {100 * (accuracy - self.baseline):+.1f} points")
        text += [
            f"{c.layer} weights, {c.rows} channels: {100 * c.gain:+.1f} ± {100 * self.error:.1f} points"
            for c in self.weights
        ]
        return text

    @property
    def by_layer(self) -> dict[str, tuple[Contribution, ...]]:
        """The weight choices of each layer, fewest channels first."""
        names = dict.fromkeys(c.layer for c in self.weights)
        return {name: tuple(c for c in self.weights if c.layer == name) for name in names}

    def optimistic(self) -> ContributionTable:
        """Return the table with every weight gain one standard error larger, to give uncertain choices a chance."""
        return replace(self, weights=tuple(replace(c, gain=c.gain + self.error) for c in self.weights))

    def predict(self, graph: Graph, scheme: SparseScheme) -> float:
        """Return the accuracy predicted by adding the gains, interpolated between measured channel counts."""
        layers, choices = graph.weighted(), self.by_layer
        frozen = next(
            (k for k, op in enumerate(reversed(layers)) if op.trains_bias and not scheme.of(op.name).bias), len(layers)
        )
        depth = max((k for k in self.bias_accuracy if k <= frozen), default=0)
        total = self.bias_accuracy.get(depth, self.baseline)
        for op in layers:
            options = choices.get(op.name, ())
            rows, gains = [0, *(c.rows for c in options)], [0.0, *(c.gain for c in options)]
            total += float(np.interp(scheme.of(op.name).rows, rows, gains))
        return min(1.0, total)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a step: static RAM in bytes, backward multiply-accumulates, and seconds or joules if measured."""

    ram_bytes: int
    backward_macs: int | None = None
    step_seconds: float | None = None
    seconds_per_mac: float | None = None
    step_joules: float | None = None
    joules_per_mac: float | None = None

    def mac_limit(self) -> float:
        """Return the tightest limit, expressed in backward multiply-accumulates."""
        limit = float("inf") if self.backward_macs is None else float(self.backward_macs)
        if self.step_seconds is not None and self.seconds_per_mac:
            limit = min(limit, self.step_seconds / self.seconds_per_mac)
        if self.step_joules is not None and self.joules_per_mac:
            limit = min(limit, self.step_joules / self.joules_per_mac)
        return limit


@dataclass(frozen=True, slots=True)
class SchemeChoice:
    """The chosen scheme, its predicted accuracy, and its needs."""

    scheme: SparseScheme
    predicted: float
    ram_bytes: int
    backward_macs: int
    proven: bool

    def describe(self) -> str:
        """Return the choice in a few lines for users."""
        proof = "optimal for these gains" if self.proven else "best found, not proven optimal"
        return (
            f"{self.scheme.describe()}\npredicted {100 * self.predicted:.1f} %; {self.ram_bytes} B of RAM, "
            f"{self.backward_macs} backward MAC; {proof}"
        )


def analyse_contributions(
    graph: Graph,
    measure: Measure,
    *,
    layers: Sequence[str] | None = None,
    ratios: Sequence[float] = RATIOS,
    depth: int | None = None,
    draws: int = DRAWS,
) -> ContributionTable:
    """Return the gains of biases and weights.

    `layers` limits whose weights are measured, `depth` how far back biases go. Takes `draws` short adaptations per
    depth, and per layer and ratio.
    """
    weighted = graph.weighted()
    deepest = len(weighted) if depth is None else min(depth, len(weighted))

    def accuracies(scheme: SparseScheme) -> NDArray[np.float64]:
        return np.asarray(measure(scheme, range(draws)), np.float64)

    baseline = accuracies(SparseScheme({}))
    biases = {k: accuracies(last_layers(graph, 0, biases=k)) for k in range(1, deepest + 1)}
    names = [op.name for op in weighted[-deepest:] if op.trains_weight] if layers is None else list(layers)
    base = last_layers(graph, 0, biases=deepest)
    gains = {}
    for name in names:
        for rows in sorted({rows_at(graph.op(name), ratio) for ratio in ratios}):
            trained = SparseScheme({**base.updates, name: replace(base.of(name), rows=rows)})
            gains[name, rows] = accuracies(trained) - biases[deepest]
    return ContributionTable(
        float(baseline.mean()),
        {k: float(values.mean()) for k, values in biases.items()},
        deepest,
        tuple(Contribution(name, rows, float(values.mean())) for (name, rows), values in gains.items()),
        _pooled_error(gains.values(), draws),
    )


def _pooled_error(samples: Iterable[NDArray[np.float64]], draws: int) -> float:
    variances = [float(np.var(values, ddof=1)) for values in samples] if draws > 1 else []
    return math.sqrt(sum(variances) / len(variances) / draws) if variances else 0.0


class Needs:
    """What schemes of this graph need, as the compiler plans them; infinite beyond the limit of backward work."""

    def __init__(self, graph: Graph, limits: Limits, q88: bool, simd: bool) -> None:
        self.graph, self.limits, self.q88, self.simd = graph, limits, q88, simd
        self._planned: dict[frozenset[tuple[str, bool, bool]], int] = {}
        self._bounded: dict[frozenset[tuple[str, bool, bool]], int] = {}

    def ram(self, scheme: SparseScheme) -> float:
        """Return the bytes of arena and trained parameters."""
        return self._ram(scheme, self._planned, lambda s: plan_memory(self.graph, s, simd=self.simd).arena.peak_bytes)

    def min_ram(self, scheme: SparseScheme) -> float:
        """Return a lower bound on these bytes for all larger schemes, without planning the arena."""
        return self._ram(scheme, self._bounded, lambda s: _arena_bound(self.graph, s, self.simd))

    def fits(self, scheme: SparseScheme) -> bool:
        return self.ram(scheme) <= self.limits.ram_bytes

    def _ram(
        self,
        scheme: SparseScheme,
        known: dict[frozenset[tuple[str, bool, bool]], int],
        arena: Callable[[SparseScheme], int],
    ) -> float:
        if backward_macs(self.graph, scheme) > self.limits.mac_limit():
            return math.inf
        key = frozenset((name, update.bias, update.rows > 0) for name, update in scheme.updates.items())
        if key not in known:  # the arena depends on which layers are trained, not on how many of their channels
            known[key] = arena(scheme)
        return known[key] + parameter_layout(self.graph, scheme.with_low_bytes() if self.q88 else scheme).size_bytes


def find_scheme(
    graph: Graph, table: ContributionTable, limits: Limits, *, q88: bool = False, simd: bool = True
) -> SchemeChoice:
    """Return the scheme with the largest predicted accuracy within the limits, by exact search over planner bytes.

    Raises BudgetError if not even inference fits, ArenaBudgetError if no scheme fits.
    """
    problem, scheme_of = choice_problem(table, Needs(graph, limits, q88, simd))
    choice = choose(problem)
    if choice is None:
        memory = plan_memory(graph, None, simd=simd)
        raise ArenaBudgetError(memory.ram_bytes, limits.ram_bytes, memory.arena.peak_bytes, 0)
    return _as_scheme_choice(graph, table, choice, scheme_of(choice.selection))


def _as_scheme_choice(
    graph: Graph, table: ContributionTable, choice: SparseChoice, scheme: SparseScheme
) -> SchemeChoice:
    predicted = min(1.0, table.baseline + choice.gain)
    return SchemeChoice(scheme, predicted, int(choice.cost), backward_macs(graph, scheme), choice.proven)


def choice_problem(table: ContributionTable, needs: Needs) -> tuple[ChoiceProblem, Callable[[Selection], SparseScheme]]:
    graph, depths = needs.graph, sorted(table.bias_accuracy)
    by_layer = table.by_layer
    biases = tuple(Option(table.bias_accuracy[k] - table.baseline, _bias_bytes(graph, k)) for k in depths)
    per_row = {name: row_bytes(graph.op(name)) * (2 if needs.q88 else 1) for name in by_layer}
    weights = tuple(tuple(Option(c.gain, c.rows * per_row[name]) for c in cs) for name, cs in by_layer.items())

    def scheme_of(selection: Selection) -> SparseScheme:
        base = last_layers(graph, 0, biases=depths[selection[0]]) if selection[0] >= 0 else SparseScheme({})
        updates = dict(base.updates)
        for (name, options), index in zip(by_layer.items(), selection[1:], strict=True):
            if index >= 0:
                updates[name] = LayerUpdate(updates.get(name, LayerUpdate()).bias, options[index].rows)
        return SparseScheme({op.name: updates[op.name] for op in graph.weighted() if op.name in updates})

    return ChoiceProblem(
        (biases, *weights),
        needs.limits.ram_bytes,
        cost=lambda selection: needs.ram(scheme_of(selection)),
        bound=lambda selection: needs.min_ram(scheme_of(selection)),
    ), scheme_of


def _bias_bytes(graph: Graph, depth: int) -> int:
    return sum(4 * op.rows for op in graph.weighted()[-depth:] if op.trains_bias)


def _arena_bound(graph: Graph, scheme: SparseScheme, simd: bool) -> int:
    if not any(update.bias or update.rows for update in scheme.updates.values()):
        return plan_memory(graph, None, simd=simd).arena.lower_bound_bytes
    return aligned(lower_bound(buffers_of(training_program(graph, scheme), scheme, simd)))


def backward_macs(graph: Graph, scheme: SparseScheme) -> int:
    """Return the multiply-accumulates of the backward pass: input gradients plus weight gradients."""
    if not any(update.bias or update.rows for update in scheme.updates.values()):
        return 0
    total = 0
    for step in training_program(graph, scheme).backward:
        op = graph.op(step.op)
        if step.kind is StepKind.INPUT:
            total += op.macs
        elif step.kind is StepKind.WEIGHT:
            total += op.macs * scheme.of(op.name).rows // op.rows
    return total
