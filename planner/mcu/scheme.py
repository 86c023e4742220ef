"""The sparse update found by measuring: contribution analysis, then an exact choice over real planner bytes.

arXiv 2206.15472 section 2.3 with two differences: the gains are measured on the user's own task with the firmware's engine,
and the choice is exact (`planner.sparse_update.choose`) over the arena and parameter bytes this compiler really plans,
not an evolutionary search over an assumed memory model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.mcu.arena import aligned, lower_bound
from planner.mcu.autodiff import LayerUpdate, SparseScheme, StepKind, last_layers, rows_at, training_program
from planner.mcu.compile import BudgetError, CompiledModel, compile_quantized
from planner.mcu.host import HostEngine, TrainOptions
from planner.mcu.ir import Graph, OpKind
from planner.mcu.memory import buffers_of, parameter_layout, plan_memory, row_bytes
from planner.mcu.quantize import Int8Array, QuantizedGraph
from planner.sparse_update import Choice, ChoiceProblem, Option, Selection, choose

RATIOS = (0.125, 0.25, 0.5, 1.0)

Measure = Callable[[SparseScheme], float]
"""Accuracy after a short adaptation with this scheme, in [0, 1]."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one choice gained: the weights of `rows` channels of `layer`, over the same biases without them."""

    layer: str
    rows: int
    gain: float


@dataclass(frozen=True, slots=True)
class ContributionTable:
    """Measured accuracies: untrained, biases of the last k layers for each k, and every weight choice's gain."""

    baseline: float
    bias_accuracy: dict[int, float]
    reference_depth: int
    weights: tuple[Contribution, ...]

    def lines(self) -> list[str]:
        """Return the table as text, in points of accuracy."""
        text = [f"not trained: {100 * self.baseline:.1f} %"]
        for depth, accuracy in self.bias_accuracy.items():
            text.append(f"biases of the last {depth}: {100 * (accuracy - self.baseline):+.1f} points")
        text += [f"{c.layer} weights, {c.rows} channels: {100 * c.gain:+.1f} points" for c in self.weights]
        return text


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may cost: static RAM in bytes, backward multiply-accumulates, and seconds or joules where measured."""

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
    """The chosen scheme, what it is predicted to reach, and what it needs."""

    scheme: SparseScheme
    predicted: float
    ram_bytes: int
    backward_macs: int
    proven: bool

    def describe(self, measured: float | None = None) -> str:
        """Return the choice in a few lines, for people."""
        outcome = f"predicted {100 * self.predicted:.1f} %" + (
            "" if measured is None else f", measured {100 * measured:.1f} %"
        )
        proof = "optimal for these gains" if self.proven else "best found, not proven optimal"
        return f"{self.scheme.describe()}\n{outcome}; {self.ram_bytes} B of RAM, {self.backward_macs} backward MAC; {proof}"


def analyse_contributions(
    graph: Graph,
    measure: Measure,
    *,
    layers: Sequence[str] | None = None,
    ratios: Sequence[float] = RATIOS,
    depth: int | None = None,
) -> ContributionTable:
    """Return what biases and weights gain; `layers` limits whose weights are measured, `depth` how far biases go.

    Costs one short adaptation per depth and one per layer and ratio.
    """
    weighted = graph.weighted()
    deepest = len(weighted) if depth is None else min(depth, len(weighted))
    baseline = measure(SparseScheme({}))
    bias_accuracy = {k: measure(last_layers(graph, 0, biases=k)) for k in range(1, deepest + 1)}
    names = [op.name for op in weighted[-deepest:]] if layers is None else list(layers)
    gains = []
    base = last_layers(graph, 0, biases=deepest)
    for name in names:
        op = graph.op(name)
        for rows in sorted({rows_at(op, ratio) for ratio in ratios}):
            updates = dict(base.updates)
            updates[name] = replace(base.of(name), rows=rows)
            gains.append(Contribution(name, rows, measure(SparseScheme(updates)) - bias_accuracy[deepest]))
    return ContributionTable(baseline, bias_accuracy, deepest, tuple(gains))


def find_scheme(
    graph: Graph, table: ContributionTable, limits: Limits, *, q88: bool = False, simd: bool = True
) -> SchemeChoice:
    """Return the scheme of the largest predicted accuracy within the limits, by exact search over planner bytes.

    Raises BudgetError when not even inference fits.
    """
    problem, scheme_of = _problem(graph, table, limits, q88, simd)
    choice = choose(problem)
    if choice is None:
        memory = plan_memory(graph, None, simd=simd)
        raise BudgetError(memory.ram_bytes, limits.ram_bytes, memory.arena.peak_bytes, 0)
    scheme = scheme_of(choice.selection)
    return _as_scheme_choice(graph, table, choice, scheme)


def _as_scheme_choice(graph: Graph, table: ContributionTable, choice: Choice, scheme: SparseScheme) -> SchemeChoice:
    predicted = min(1.0, table.baseline + choice.gain)
    return SchemeChoice(scheme, predicted, int(choice.cost), backward_macs(graph, scheme), choice.proven)


def _problem(
    graph: Graph, table: ContributionTable, limits: Limits, q88: bool, simd: bool
) -> tuple[ChoiceProblem, Callable[[Selection], SparseScheme]]:
    depths = sorted(table.bias_accuracy)
    by_layer: dict[str, list[Contribution]] = {}
    for contribution in table.weights:
        by_layer.setdefault(contribution.layer, []).append(contribution)
    biases = tuple(Option(table.bias_accuracy[k] - table.baseline, _bias_bytes(graph, k)) for k in depths)
    per_row = {name: row_bytes(graph.op(name)) * (2 if q88 else 1) for name in by_layer}
    weights = tuple(tuple(Option(c.gain, c.rows * per_row[name]) for c in cs) for name, cs in by_layer.items())

    def scheme_of(selection: Selection) -> SparseScheme:
        base = last_layers(graph, 0, biases=depths[selection[0]]) if selection[0] >= 0 else SparseScheme({})
        updates = dict(base.updates)
        for (name, options), index in zip(by_layer.items(), selection[1:], strict=True):
            if index >= 0:
                updates[name] = LayerUpdate(updates.get(name, LayerUpdate()).bias, options[index].rows)
        return SparseScheme({op.name: updates[op.name] for op in graph.weighted() if op.name in updates})

    planned: dict[frozenset[tuple[str, bool, bool]], int] = {}
    bounded: dict[frozenset[tuple[str, bool, bool]], int] = {}
    mac_limit = limits.mac_limit()

    def ram(
        selection: Selection, known: dict[frozenset[tuple[str, bool, bool]], int], arena: Callable[[SparseScheme], int]
    ) -> float:
        scheme = scheme_of(selection)
        if backward_macs(graph, scheme) > mac_limit:
            return float("inf")
        key = frozenset((name, update.bias, update.rows > 0) for name, update in scheme.updates.items())
        if key not in known:  # the arena depends on which layers are trained, not on how many of their channels
            known[key] = arena(scheme)
        return known[key] + parameter_layout(graph, scheme, q88).size_bytes

    return ChoiceProblem(
        (biases, *weights),
        limits.ram_bytes,
        cost=lambda s: ram(s, planned, lambda scheme: plan_memory(graph, scheme, simd=simd).arena.peak_bytes),
        bound=lambda s: ram(s, bounded, lambda scheme: _arena_bound(graph, scheme, simd)),
    ), scheme_of


def _bias_bytes(graph: Graph, depth: int) -> int:
    return sum(4 * op.out_shape.channels for op in graph.weighted()[-depth:])


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
        if step.kind is StepKind.INPUT and op.kind not in (OpKind.AVERAGE_POOL, OpKind.MAX_POOL):
            total += op.macs
        elif step.kind is StepKind.WEIGHT:
            total += op.macs * scheme.of(op.name).rows // op.out_shape.channels
    return total


@dataclass(frozen=True, eq=False)
class EngineMeasure:
    """Accuracy after a short adaptation with the firmware's own engine, averaged over seeds; a `Measure`."""

    model: QuantizedGraph
    train_inputs: Int8Array
    train_labels: NDArray[np.int64]
    test_inputs: Int8Array
    test_labels: NDArray[np.int64]
    epochs: int = 5
    options: TrainOptions = TrainOptions()  # noqa: RUF009 - frozen
    seeds: tuple[int, ...] = (0, 1)

    def __call__(self, scheme: SparseScheme) -> float:
        compiled = compile_quantized(self.model, scheme=scheme)
        if not compiled.memory.program.backward:
            return HostEngine(compiled).evaluate(self.test_inputs, self.test_labels)[1]
        return float(np.mean([self.adapt(compiled, seed) for seed in self.seeds]))

    def adapt(self, compiled: CompiledModel, seed: int) -> float:
        """Return the accuracy after training `compiled` from its initial parameters, samples shuffled by `seed`."""
        engine = HostEngine(compiled)
        engine.set_options(self.options)
        engine.state = replace(engine.state, generator=seed * 2654435761 % 2**32 + 1)
        shuffle = np.random.default_rng(seed)
        for _ in range(self.epochs):
            engine.train_many(self.train_inputs, self.train_labels, shuffle.permutation(len(self.train_inputs)))
        return engine.evaluate(self.test_inputs, self.test_labels)[1]


@dataclass(frozen=True, slots=True, eq=False)
class FittedModel:
    """A model compiled again for the scheme that gains most on its own task, and what that rests on."""

    model: CompiledModel
    table: ContributionTable
    choice: SchemeChoice
    measured: float


def fit_scheme(
    model: CompiledModel,
    inputs: Int8Array,
    labels: NDArray[np.int64],
    limits: Limits,
    *,
    epochs: int = 5,
    options: TrainOptions = TrainOptions(),  # noqa: B008 - frozen
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FittedModel:
    """Return `model` compiled for the best scheme within `limits`, found on samples that it will be adapted to.

    Two thirds of the samples train, one third judges; `epochs` and `options` should be those of the job. Raises
    BudgetError when not even inference fits.
    """
    cut = 2 * len(labels) // 3
    graph, done = model.quantized.graph, 0
    judge = EngineMeasure(model.quantized, inputs[:cut], labels[:cut], inputs[cut:], labels[cut:], epochs, options)
    depth = len(graph.weighted())
    total = 2 + depth + sum(len({rows_at(op, ratio) for ratio in RATIOS}) for op in graph.weighted())

    def measure(scheme: SparseScheme) -> float:
        nonlocal done
        score = judge(scheme)
        done += 1
        progress(done, total)
        return score

    table = analyse_contributions(graph, measure)
    choice = find_scheme(graph, table, limits, simd=model.simd)
    compiled = compile_quantized(model.quantized, scheme=choice.scheme, simd=model.simd)
    return FittedModel(compiled, table, choice, measure(choice.scheme))
