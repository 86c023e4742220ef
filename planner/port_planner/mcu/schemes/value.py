"""Train less or page more: candidates are planned for the same RAM, and trained on the samples that they are for.

The rule: among candidates whose measured accuracy is within one standard error of the best one's, the one with the most
accuracy per joule wins. The error is that of the difference, paired over the trainings. This is the one-standard-error
rule of Breiman et al., Classification and Regression Trees, 1984. Joules are those of the whole job by the board's
file, so that saved work counts as much as saved pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from port_planner.base.errors import PortError
from port_planner.mcu.autodiff import SparseScheme, full_scheme, last_layers
from port_planner.mcu.choose_plan import BoardDeadlineError, FitOptions, FittedMemory
from port_planner.mcu.compile import CompiledModel, with_memory
from port_planner.mcu.host import UpdateOptions
from port_planner.mcu.ir import Graph
from port_planner.mcu.low_bytes import fit_low_bytes
from port_planner.mcu.memory import ArenaBudgetError
from port_planner.mcu.quantize import Int8Array
from port_planner.mcu.schemes.fit import EngineMeasure

TRAININGS = 12
"""Trainings of each candidate: four cross-validations of three folds."""

SHARES = (0.25, 0.5, 0.75)
"""Shares of a network's layers at which candidates between nothing and everything begin, from the last layer
backward."""


@dataclass(frozen=True, slots=True, eq=False)
class ValuedCandidate:
    """A candidate within the limits: its plan, its accuracies, one per training, and the joules of the whole job."""

    origin: str
    scheme: SparseScheme
    fitted: FittedMemory
    accuracies: tuple[float, ...]
    job_joules: float
    untrained: float

    @property
    def accuracy(self) -> float:
        """Return the mean over the trainings, a share."""
        return float(np.mean(self.accuracies))

    @property
    def gain_per_joule(self) -> float:
        """Return the accuracy that training adds, as a share per joule."""
        return (self.accuracy - self.untrained) / self.job_joules

    def behind(self, other: ValuedCandidate) -> tuple[float, float]:
        """Return how far this accuracy is below the other's, and the standard error of that difference."""
        differences = np.subtract(other.accuracies, self.accuracies)
        return float(differences.mean()), float(differences.std(ddof=1)) / len(differences) ** 0.5


@dataclass(frozen=True, slots=True)
class RefusedCandidate:
    """A candidate that no plan fits, and the reason."""

    origin: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Valuation:
    """The measurements. `best` is the most accurate candidate, `model` is compiled for the chosen one."""

    model: CompiledModel
    best: ValuedCandidate
    chosen: ValuedCandidate
    valued: tuple[ValuedCandidate, ...]
    refused: tuple[RefusedCandidate, ...]


def value_candidates(graph: Graph, own: Mapping[str, SparseScheme]) -> dict[str, SparseScheme]:
    """Return schemes from a few layers to all by origin, those of `own` first; equal schemes appear once."""
    count = len(graph.weighted())
    found = dict(own)
    for layers in sorted({max(1, round(share * count)) for share in SHARES} - {count}):
        found[f"last {layers} layers"] = last_layers(graph, layers)
    found["everything"] = full_scheme(graph)
    distinct: dict[str, tuple[str, SparseScheme]] = {}
    for origin, scheme in found.items():
        distinct.setdefault(scheme.describe(), (origin, scheme))
    return dict(distinct.values())


def value_schemes(
    model: CompiledModel,
    inputs: Int8Array,
    labels: NDArray[np.int64],
    candidates: Mapping[str, SparseScheme],
    fit: FitOptions,
    *,
    epochs: int = 5,
    options: UpdateOptions = UpdateOptions(),  # noqa: B008 - frozen
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Valuation:
    """Return accuracy and cost of each candidate within `fit`, and the model of the chosen one; deterministic.

    `epochs` and `options` should be those of the job. `progress` receives the number of candidates done and their
    total. Raises the first candidate's ArenaBudgetError or BoardDeadlineError if none fits.
    """
    judge = EngineMeasure(model.quantized, inputs, labels, epochs, options)
    draws = range(TRAININGS)
    untrained = float(np.mean(judge(SparseScheme({}), draws)))
    valued: list[ValuedCandidate] = []
    refused: list[tuple[str, PortError]] = []
    for done, (origin, scheme) in enumerate(candidates.items()):
        progress(done, len(candidates))
        try:
            wide = scheme.with_low_bytes() if model.q88 else scheme
            fitting, fitted = fit_low_bytes(model.quantized.graph, wide, fit, simd=model.simd)
        except (ArenaBudgetError, BoardDeadlineError) as error:
            refused.append((origin, error))
            continue
        joules = fitted.joules * len(labels) * epochs
        valued.append(ValuedCandidate(origin, fitting, fitted, tuple(judge(fitting, draws)), joules, untrained))
    progress(len(candidates), len(candidates))
    if not valued:
        raise refused[0][1]
    best = max(valued, key=lambda candidate: (candidate.accuracy, -candidate.job_joules))
    chosen = max_per_joule(valued, best)
    compiled = with_memory(model, chosen.scheme, chosen.fitted.memory)
    unfit = tuple(RefusedCandidate(origin, str(error)) for origin, error in refused)
    return Valuation(compiled, best, chosen, tuple(valued), unfit)


def max_per_joule(valued: Sequence[ValuedCandidate], best: ValuedCandidate) -> ValuedCandidate:
    """Return the candidate with the most gain per joule among those within one standard error of `best`."""
    near = [candidate for candidate in valued if _is_near(candidate, best)]
    return max(near, key=lambda candidate: (candidate.gain_per_joule, -candidate.job_joules))


def _is_near(candidate: ValuedCandidate, best: ValuedCandidate) -> bool:
    behind, error = candidate.behind(best)
    return behind <= error
