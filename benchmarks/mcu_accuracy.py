"""Accuracy of on-device training: int8 update rules against fp32, and found schemes against the last k layers.

    python -m benchmarks.mcu_accuracy [--seeds 8] [--first-seed 50] [--tasks digits,keywords,gestures,camera,mobilenet]
        [--only rules|schemes|everything|chosen] [--json]

Every number is the mean over seeds of the accuracy after the last epoch on samples never trained on. Learning rates
decay linearly over the epochs; each row's is the best of its grid on the mean of five extra seeds, but for the row that
takes fp32's as it is, which is what quantisation-aware scaling promises. Seeds below 50 were looked at while nets and
grids were chosen, those reported were not. All int8 runs use the firmware's C engine, built for this machine, batch 1,
in place. Differences are paired: the mean over seeds of the difference within a seed, with its standard error.

Schemes are found as `port-agent mcu compile --sparse-update` finds them for its user: once per seed, by `fit_scheme` on
that seed's own model and training samples; the test samples judge nothing before the scheme is chosen. The search was
set up on seeds 200 to 205. "knapsack alone" is its answer before the race of
`port_planner.mcu.schemes.contributions.race`.

`--only chosen` trains all layers at the rate that `port-agent mcu compile --choose-rate` finds on that seed's own
training samples with int8, fp32 too. Nothing here is a published figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.mcu_networks.float_training import FloatSparseModel
from benchmarks.mcu_networks.schemes import last_five
from benchmarks.mcu_tasks import TASKS, Split, Task, pretrain
from benchmarks.tables import table_console
from port_planner.mcu import (
    CompiledModel,
    HostEngine,
    SparseScheme,
    UpdateOptions,
    UpdateRounding,
    compile_quantized,
    last_layers,
)
from port_planner.mcu.autodiff import full_scheme
from port_planner.mcu.frontend import import_module
from port_planner.mcu.host import FAST
from port_planner.mcu.ir import Graph
from port_planner.mcu.memory import plan_memory
from port_planner.mcu.quantize import QuantizedGraph, quantize
from port_planner.mcu.schemes.contributions import Limits
from port_planner.mcu.schemes.fit import fit_scheme
from port_planner.mcu.schemes.rate import choose_rate

FRESH_SEED = 50
"""The first seed by which nothing was chosen."""
TUNING_SEEDS = (100, 101, 102, 103, 104)
SCHEME_RATE = 0.01
FOUND, KNAPSACK, LAST_K = "found", "knapsack alone", "last k layers"
SCALED_RATES = (0.01, 0.03, 0.05, 0.08)
LOW_RATES = (0.003, *SCALED_RATES)
"""For the update of everything: at higher rates, both fp32 and int8 diverge."""
UNSCALED_RATES = (100.0, 300.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table: fp32, or one int8 rule with or without quantisation-aware scaling."""

    name: str
    rule: UpdateRounding | None = None
    scaling: bool = True
    rate_of_float: bool = False
    """Whether it trains at the learning rate that was best for fp32."""
    everything: bool = False
    """Whether it trains all layers, not only the sparse set."""
    chosen: float | None = None
    """The share of the channels that a step trains, those with the largest gradients; None: all."""
    narrow: frozenset[str] = frozenset()
    """Layers without low bytes, whose weights the Q8.8 rule rounds stochastically."""

    @property
    def rates(self) -> tuple[float, ...]:
        if self.everything:
            return LOW_RATES
        return SCALED_RATES if self.scaling else UNSCALED_RATES


METHODS = (
    Method("fp32, same sparse set"),
    Method("int8 stochastic, QAS", UpdateRounding.STOCHASTIC),
    Method("int8 stochastic, QAS, fp32's rate", UpdateRounding.STOCHASTIC, rate_of_float=True),
    Method("int8 nearest, QAS", UpdateRounding.NEAREST),
    Method("int8 truncate, QAS", UpdateRounding.TRUNCATE),
    Method("Q8.8 nearest, QAS", UpdateRounding.Q88),
    Method("int8 stochastic, no QAS", UpdateRounding.STOCHASTIC, False),
    Method("int8 nearest, no QAS", UpdateRounding.NEAREST, False),
    Method("Q8.8 nearest, no QAS", UpdateRounding.Q88, False),
)


STOCHASTIC_ALL, STOCHASTIC_SPARSE = "int8 stochastic, QAS, all layers", "int8 stochastic, QAS, sparse set"
MIXED = "Q8.8 where it fits, QAS, all layers"
EVERYTHING = (
    Method("fp32, all layers", everything=True),
    Method(STOCHASTIC_ALL, UpdateRounding.STOCHASTIC, everything=True),
    Method("Q8.8 nearest, QAS, all layers", UpdateRounding.Q88, everything=True),
    Method("int8 stochastic, QAS, a quarter of the channels", UpdateRounding.STOCHASTIC, everything=True, chosen=0.25),
    Method(STOCHASTIC_SPARSE, UpdateRounding.STOCHASTIC),
)
"""Methods that recomputation and paging make room for, alongside the sparse set."""


AT_CHOSEN_RATE = tuple(method for method in EVERYTHING if method.everything and method.chosen is None)
"""Methods that train all layers, in fp32 and by both int8 rules, at the rate that the product chooses."""


@dataclass(frozen=True, slots=True, eq=False)
class PretrainedTask:
    """One seed of one task: its data and the pretrained model, quantised."""

    split: Split
    model: QuantizedGraph


@dataclass(frozen=True, slots=True)
class Row:
    """Mean and standard deviation over seeds, in percent, and the difference to fp32 in
    points with its standard error.
    """

    task: str
    method: str
    learning_rate: float
    accuracy: float
    deviation: float
    difference: float
    difference_error: float | None
    seeds: int


def paired_difference(accuracies: Sequence[float], reference: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean difference of accuracies within seeds and its standard error, in points; None of one seed."""
    differences = 100 * (np.asarray(accuracies) - np.asarray(reference))
    error = float(np.std(differences, ddof=1)) / len(differences) ** 0.5 if len(differences) > 1 else None
    return float(np.mean(differences)), error


def prepare(task: Task, seed: int) -> PretrainedTask:
    """Return one seed, pretrained and quantised with the first domain as calibration data."""
    split = task.split(seed)
    module = pretrain(task, split.before, seed)
    graph = import_module(module, split.before.inputs.shape[1:], task.name)
    return PretrainedTask(split, quantize(graph, split.before.inputs[:256]))


def _rates(rate: float, epochs: int) -> list[float]:
    return [rate * (1 - epoch / epochs) for epoch in range(epochs)]


def adapt_int8(compiled: CompiledModel, split: Split, method: Method, rate: float, epochs: int, seed: int) -> float:
    """Return the test accuracy after training the int8 model in place."""
    engine = HostEngine(compiled, FAST)
    engine.state = replace(engine.state, generator=seed * 7919 + 1)
    train, test = compiled.quantize_input(split.train.inputs), compiled.quantize_input(split.test.inputs)
    shuffle = np.random.default_rng(seed)
    for now in _rates(rate, epochs):
        engine.set_options(UpdateOptions(now, method.rule or UpdateRounding.STOCHASTIC, method.scaling))
        engine.train_many(train, split.train.labels, shuffle.permutation(len(train)))
    return engine.evaluate(test, split.test.labels)[1]


def adapt_float(graph: Graph, scheme: SparseScheme, split: Split, rate: float, epochs: int, seed: int) -> float:
    """Return the test accuracy after the same training in fp32."""
    model = FloatSparseModel(graph, scheme)
    shuffle = np.random.default_rng(seed)
    for now in _rates(rate, epochs):
        model.train(split.train.inputs, split.train.labels, shuffle.permutation(len(split.train.labels)), now)
    return model.accuracy(split.test.inputs, split.test.labels)


Sparse = Callable[[Graph], SparseScheme]
"""What a sparse update trains of a network."""


def run_method(
    task: Task, pretrained: PretrainedTask, method: Method, rate: float, seed: int, sparse: Sparse = last_five
) -> float:
    """Return the accuracy of one method on one seed."""
    graph = pretrained.model.graph
    scheme = replace(full_scheme(graph) if method.everything else sparse(graph), chosen=method.chosen)
    if method.rule is None:
        return adapt_float(pretrained.model.graph, scheme, pretrained.split, rate, task.epochs, seed)
    if method.rule is UpdateRounding.Q88:
        scheme = scheme.with_low_bytes(method.narrow)
    compiled = compile_quantized(pretrained.model, scheme=scheme)
    return adapt_int8(compiled, pretrained.split, method, rate, task.epochs, seed)


def _best_rate(task: Task, tuning: dict[int, PretrainedTask], method: Method, sparse: Sparse) -> float:
    def score(rate: float) -> float:
        found = [run_method(task, pretrained, method, rate, seed, sparse) for seed, pretrained in tuning.items()]
        return float(np.mean(found))

    if task.rate is not None:
        return task.rate
    return max(method.rates, key=score)


def compare_rules(
    task: Task, seeds: Sequence[int], console: Console, methods: Sequence[Method] = METHODS, sparse: Sparse = last_five
) -> list[Row]:
    """Return one row per method, compared with the first, with the accuracy before adapting in front."""
    tuning = {seed: prepare(task, seed) for seed in TUNING_SEEDS} if task.rate is None else {}
    shared = _best_rate(task, tuning, methods[0], sparse)
    best = {m.name: shared if m.rate_of_float else _best_rate(task, tuning, m, sparse) for m in methods[1:]}
    best[methods[0].name] = shared
    scores: dict[str, list[float]] = {"before adapting": [], **{m.name: [] for m in methods}}
    for seed in seeds:
        pretrained = prepare(task, seed)
        scores["before adapting"].append(untrained_accuracy(pretrained))
        for method in methods:
            scores[method.name].append(run_method(task, pretrained, method, best[method.name], seed, sparse))
        console.print(
            f"{task.name}, seed {seed}: " + ", ".join(f"{100 * values[-1]:.1f}" for values in scores.values()),
            style="dim",
        )
    return _rows(task, scores, methods[0].name, best)


def _rows(task: Task, scores: Mapping[str, list[float]], reference: str, rates: Mapping[str, float]) -> list[Row]:
    return [
        Row(
            task.name,
            name,
            rates.get(name, 0.0),
            100 * float(np.mean(values)),
            100 * float(np.std(values)),
            *paired_difference(values, scores[reference]),
            len(values),
        )
        for name, values in scores.items()
    ]


def compare_at_chosen_rate(task: Task, seeds: Sequence[int], console: Console) -> list[Row]:
    """Return one row per method, compared with fp32 at the same rate, each seed at the rate chosen for it."""
    scores: dict[str, list[float]] = {"before adapting": [], **{method.name: [] for method in AT_CHOSEN_RATE}}
    for seed in seeds:
        pretrained = prepare(task, seed)
        rate = _chosen_rate(task, pretrained)
        scores["before adapting"].append(untrained_accuracy(pretrained))
        for method in AT_CHOSEN_RATE:
            scores[method.name].append(run_method(task, pretrained, method, rate, seed))
        console.print(
            f"{task.name}, seed {seed}, rate {rate:g}: "
            + ", ".join(f"{100 * values[-1]:.1f}" for values in scores.values()),
            style="dim",
        )
    return _rows(task, scores, AT_CHOSEN_RATE[0].name, {})


def _chosen_rate(task: Task, pretrained: PretrainedTask) -> float:
    train, model = pretrained.split.train, compile_quantized(pretrained.model)
    return choose_rate(model, model.quantize_input(train.inputs), train.labels, epochs=task.epochs).best.rate


def untrained_accuracy(pretrained: PretrainedTask) -> float:
    """Return the int8 model's accuracy on the new domain before it learns."""
    compiled = compile_quantized(pretrained.model, scheme=SparseScheme({}))
    return HostEngine(compiled, FAST).evaluate(
        compiled.quantize_input(pretrained.split.test.inputs), pretrained.split.test.labels
    )[1]


@dataclass(frozen=True, slots=True)
class SchemeRow:
    """One way to choose a scheme, at the bytes of the last-k scheme: means over seeds, in percent.

    `predicted` adds up contributions, `measured` is what the choice itself measured in the analysis; both see training
    samples only. `difference` is to the last k layers, in points.
    """

    task: str
    schemes: tuple[str, ...]
    """One per seed."""
    method: str
    budget_bytes: int
    ram_bytes: float
    predicted: float | None
    measured: float | None
    accuracy: float
    difference: float
    difference_error: float | None
    seeds: int


@dataclass(frozen=True, slots=True)
class _Tried:
    """One way to choose a scheme on one seed; shares, not percent."""

    scheme: SparseScheme
    ram_bytes: int
    accuracy: float
    predicted: float | None = None
    measured: float | None = None


def last_k_schemes(graph: Graph) -> list[SparseScheme]:
    """Return every "train the last k layers whole" scheme, smallest first."""
    return [last_layers(graph, k) for k in range(1, len(graph.weighted()) + 1)]


def compare_schemes(task: Task, seeds: Sequence[int], rate: float, console: Console) -> list[SchemeRow]:
    """Return the comparison at the bytes of the last-k scheme in the middle of the range."""
    tried: dict[str, list[_Tried]] = {}
    for seed in seeds:
        for method, result in _try_schemes(task, seed, rate).items():
            tried.setdefault(method, []).append(result)
        latest = ", ".join(f"{method} {100 * results[-1].accuracy:.1f}" for method, results in tried.items())
        console.print(f"{task.name}, seed {seed}: {latest}", style="dim")
    rival = tried[LAST_K]
    return [
        SchemeRow(
            task.name,
            tuple(result.scheme.describe() for result in results),
            method,
            rival[0].ram_bytes,
            float(np.mean([result.ram_bytes for result in results])),
            _mean_percent([result.predicted for result in results]),
            _mean_percent([result.measured for result in results]),
            100 * float(np.mean([result.accuracy for result in results])),
            *paired_difference([result.accuracy for result in results], [other.accuracy for other in rival]),
            len(results),
        )
        for method, results in tried.items()
    ]


def _mean_percent(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return 100 * float(np.mean(known)) if known else None


def _try_schemes(task: Task, seed: int, rate: float) -> dict[str, _Tried]:
    pretrained = prepare(task, seed)
    graph, train = pretrained.model.graph, pretrained.split.train
    schemes = last_k_schemes(graph)
    rival = schemes[len(schemes) // 2 - 1]
    budget = plan_memory(graph, rival).ram_bytes
    model = compile_quantized(pretrained.model, scheme=rival)
    inputs, options = model.quantize_input(train.inputs), UpdateOptions(rate)
    fitted = fit_scheme(model, inputs, train.labels, Limits(budget), epochs=task.epochs, options=options)
    best, optimum = fitted.best, fitted.optimum

    def accuracy(scheme: SparseScheme) -> float:
        return _scheme_accuracy(task, pretrained, scheme, rate, seed)

    return {
        FOUND: _Tried(best.scheme, best.ram_bytes, accuracy(best.scheme), best.predicted, best.measured),
        KNAPSACK: _Tried(optimum.scheme, optimum.ram_bytes, accuracy(optimum.scheme), optimum.predicted),
        LAST_K: _Tried(rival, budget, accuracy(rival)),
    }


def _scheme_accuracy(task: Task, pretrained: PretrainedTask, scheme: SparseScheme, rate: float, seed: int) -> float:
    compiled = compile_quantized(pretrained.model, scheme=scheme)
    return adapt_int8(compiled, pretrained.split, METHODS[1], rate, task.epochs, seed)


def _gap(row: Row | SchemeRow) -> str:
    return f"{row.difference:+.1f}" + ("" if row.difference_error is None else f" ± {row.difference_error:.1f}")


def print_rules(rows: Sequence[Row], console: Console) -> None:
    """Print the rounding rules, one table for all tasks."""
    table = Table(
        title="accuracy after adapting on the device, percent, mean ± deviation over seeds; against fp32 ± standard "
        "error"
    )
    for heading in ("task", "update", "learning rate", "accuracy", "against fp32"):
        table.add_column(heading, justify="left" if heading in ("task", "update") else "right")
    for row in rows:
        rate = f"{row.learning_rate:g}" if row.learning_rate else ""
        table.add_row(row.task, row.method, rate, f"{row.accuracy:.1f} ± {row.deviation:.1f}", _gap(row))
    console.print(table)


def print_schemes(rows: Sequence[SchemeRow], console: Console) -> None:
    """Print the found schemes against the last k layers, and what each seed's scheme is."""
    table = Table(title="sparse scheme found by analysis against the last k layers within the same RAM, percent")
    for heading in ("task", "scheme", "RAM, bytes", "predicted", "measured", "accuracy", "against last k"):
        table.add_column(heading, justify="left" if heading in ("task", "scheme") else "right")
    for row in rows:
        figures = (f"{value:.1f}" if value is not None else "" for value in (row.predicted, row.measured, row.accuracy))
        gap = "" if row.method == LAST_K else _gap(row)
        table.add_row(row.task, row.method, f"{row.ram_bytes:.0f} of {row.budget_bytes}", *figures, gap)
    console.print(table)
    for row in (row for row in rows if row.method != KNAPSACK):
        for scheme, count in Counter(row.schemes).most_common():
            console.print(f"{row.task}, {row.method}, {count} of {row.seeds} seeds: {scheme}", style="dim")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; return 0."""
    parser = argparse.ArgumentParser(description="accuracy of on-device training")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=FRESH_SEED)
    parser.add_argument("--tasks", default=",".join(task.name for task in TASKS if task.rate is None))
    parser.add_argument("--only", choices=("rules", "schemes", "everything", "chosen"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    progress = Console(stderr=True)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rules: list[Row] = []
    schemes: list[SchemeRow] = []
    for task in (task for task in TASKS if task.name in options.tasks.split(",")):
        if options.only in (None, "rules"):
            rules += compare_rules(task, seeds, progress)
        if options.only in (None, "everything"):
            rules += compare_rules(task, seeds, progress, EVERYTHING)
        if options.only == "chosen":
            rules += compare_at_chosen_rate(task, seeds, progress)
        if options.only in (None, "schemes"):
            schemes += compare_schemes(task, seeds, SCHEME_RATE, progress)
    if options.json:
        print(
            json.dumps({"rules": [asdict(row) for row in rules], "schemes": [asdict(row) for row in schemes]}, indent=1)
        )
        return 0
    console = table_console()
    if rules:
        print_rules(rules, console)
    if schemes:
        print_schemes(schemes, console)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
