"""Choose the learning rate that suits a model's own samples, measured on samples held out of each training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from port_planner.mcu.autodiff import SparseScheme
from port_planner.mcu.compile import CompiledModel
from port_planner.mcu.host import UpdateOptions
from port_planner.mcu.quantize import Int8Array
from port_planner.mcu.schemes.fit import EngineMeasure

RATES = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
FOLDS = 3
CRAMPED_SHARE = 0.05
"""Share of a layer's weights at the end of their range from which the user is told."""


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """A learning rate, and its accuracy on each fold that its training did not see."""

    rate: float
    accuracies: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        """The mean over the folds."""
        return float(np.mean(self.accuracies))


@dataclass(frozen=True, slots=True)
class RateChoice:
    """The rates that were measured, and the accuracy without training on the same folds.

    `explains`: the accuracy is the share of the targets' variance that is explained.
    """

    measured: tuple[MeasuredRate, ...]
    untrained: float
    explains: bool = False
    at_limit: Mapping[str, float] = field(default_factory=dict)
    """Share of each layer's weights that training at the best rate leaves at the end of their range."""

    @property
    def cramped(self) -> tuple[str, ...]:
        """The layers of which at least CRAMPED_SHARE of the weights cannot grow further."""
        return tuple(name for name, share in self.at_limit.items() if share >= CRAMPED_SHARE)

    @property
    def best(self) -> MeasuredRate:
        """The most accurate rate; among equals the slowest, which forgets least."""
        return max(self.measured, key=lambda found: (found.accuracy, -found.rate))

    @property
    def helps(self) -> bool:
        """Whether training at the best rate gives more correct answers than no training."""
        return self.best.accuracy > self.untrained


def choose_rate(
    model: CompiledModel,
    inputs: Int8Array,
    labels: NDArray[np.int64],
    *,
    epochs: int = 1,
    options: UpdateOptions = UpdateOptions(),  # noqa: B008 - frozen
    rates: Sequence[float] = RATES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RateChoice:
    """Return the accuracy of each rate on samples that it did not train on; deterministic.

    For a model with targets, `rates` are those of half the sum of the squared errors: gradients of their mean are
    smaller the more outputs it has. `epochs` and `options` should be those of the job. `progress` receives the number
    of rates done and their total.
    """
    judge = EngineMeasure(model.quantized, inputs, labels, epochs, options, FOLDS)
    draws = range(FOLDS)
    untrained = float(np.mean(judge(SparseScheme({}), draws)))
    measured: list[MeasuredRate] = []
    targets = model.quantized.graph.targets
    for done, each in enumerate(rates):
        progress(done, len(rates))
        rate = each * targets / 2 if targets else each
        measured.append(MeasuredRate(rate, tuple(_at_rate(judge, rate)(model.scheme, draws))))
    progress(len(rates), len(rates))
    found = RateChoice(tuple(measured), untrained, targets > 0)
    return replace(found, at_limit=_at_rate(judge, found.best.rate).at_limit(model.scheme))


def _at_rate(judge: EngineMeasure, rate: float) -> EngineMeasure:
    return replace(judge, options=replace(judge.options, learning_rate=rate))
