"""Fit a compiled model to its training samples: find the sparse update that suits them best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from port_planner.base.targets import explained_share
from port_planner.mcu.autodiff import SparseScheme, rows_at
from port_planner.mcu.compile import CompiledModel, compile_quantized
from port_planner.mcu.host import FAST, HostEngine, UpdateOptions, UpdateRounding
from port_planner.mcu.quantize import Int8Array, QuantizedGraph
from port_planner.mcu.schemes.contributions import (
    DRAWS,
    RATIOS,
    ContributionTable,
    Limits,
    SchemeChoice,
    analyse_contributions,
    find_scheme,
)
from port_planner.mcu.schemes.race import MAX_FINALISTS, Finalist, find_finalists, race, race_draws


@dataclass(frozen=True, eq=False)
class EngineMeasure:
    """Accuracy after a short adaptation with the firmware's own engine, by repeated cross-validation; a `Measure`.

    As many consecutive draws as there are folds evaluate every sample once. Each fold is evaluated by a model that
    trained on the others, from its initial parameters. For a model with targets, which follow the inputs, the accuracy
    is the share of their variance that it explains.
    """

    model: QuantizedGraph
    inputs: Int8Array
    labels: NDArray[np.int64]
    epochs: int = 5
    options: UpdateOptions = UpdateOptions()  # noqa: RUF009 - frozen
    folds: int = 3

    def __call__(self, scheme: SparseScheme, draws: Sequence[int]) -> list[float]:
        engine = self._engine(scheme)
        return [self._adapt(engine, draw) for draw in draws]

    def at_limit(self, scheme: SparseScheme) -> dict[str, float]:
        """Return, by layer, the share of trained weights that the first adaptation leaves at the end of their range."""
        engine = self._engine(scheme)
        self._adapt(engine, 0)
        return {name: engine.at_limit(name) for name, update in scheme.updates.items() if update.rows}

    def _engine(self, scheme: SparseScheme) -> HostEngine:
        compiled = compile_quantized(self.model, scheme=scheme)
        engine = HostEngine(compiled, FAST)
        low_bytes = self.options.rule is not UpdateRounding.Q88 or compiled.q88
        engine.set_options(self.options if low_bytes else replace(self.options, rule=UpdateRounding.STOCHASTIC))
        return engine

    def _adapt(self, engine: HostEngine, draw: int) -> float:
        order = np.random.default_rng(draw // self.folds).permutation(len(self.labels))
        judged = np.arange(len(order)) % self.folds == draw % self.folds
        trained, shuffle = order[~judged], np.random.default_rng(draw)
        engine.reset()
        engine.state = replace(engine.state, generator=draw * 2654435761 % 2**32 + 1)
        for _ in range(self.epochs if engine.model.memory.program.backward else 0):
            engine.train_many(self.inputs, self.labels, shuffle.permutation(trained))
        loss, accuracy = engine.evaluate(self.inputs[order[judged]], self.labels[order[judged]])
        targets = self.model.graph.targets
        return explained_share(loss, self.inputs, targets) if targets else accuracy


@dataclass(frozen=True, slots=True, eq=False)
class FittedModel:
    """A model compiled again for the scheme that measured best on its own task, and the measurements behind it."""

    model: CompiledModel
    table: ContributionTable
    optimum: SchemeChoice
    """The knapsack's answer from measurements of single contributions only."""
    finalists: tuple[Finalist, ...]
    """Finalists in the order of the race; `model` trains the first."""

    @property
    def best(self) -> Finalist:
        return self.finalists[0]


def fit_scheme(
    model: CompiledModel,
    inputs: Int8Array,
    labels: NDArray[np.int64],
    limits: Limits,
    *,
    epochs: int = 5,
    options: UpdateOptions = UpdateOptions(),  # noqa: B008 - frozen
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FittedModel:
    """Return `model` compiled for the best scheme within `limits`, found on samples that it will be adapted to.

    Contribution analysis, knapsack and race, all by cross-validation within the samples. `epochs` and `options`
    should be those of the job. `progress` receives the number of adaptations done and their total. Raises BudgetError
    if not even inference fits.
    """
    graph, done = model.quantized.graph, 0
    q88 = options.rule is UpdateRounding.Q88
    judge = EngineMeasure(model.quantized, inputs, labels, epochs, options)
    choices = sum(len({rows_at(op, ratio) for ratio in RATIOS}) for op in graph.weighted())
    analysis = DRAWS * (1 + len(graph.weighted()) + choices)
    total = analysis + race_draws(MAX_FINALISTS)

    def measure(scheme: SparseScheme, draws: Sequence[int]) -> list[float]:
        nonlocal done
        scores = judge(scheme.with_low_bytes() if q88 else scheme, draws)
        done += len(draws)
        progress(done, total)
        return scores

    table = analyse_contributions(graph, measure)
    optimum = find_scheme(graph, table, limits, q88=q88, simd=model.simd)
    field = find_finalists(graph, table, limits, q88=q88, simd=model.simd)
    total = analysis + race_draws(len(field))
    ranking = race(field, measure)
    compiled = compile_quantized(model.quantized, scheme=ranking[0].scheme, q88=q88, simd=model.simd)
    return FittedModel(compiled, table, optimum, ranking)
