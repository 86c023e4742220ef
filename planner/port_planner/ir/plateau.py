"""Learning rates that are lowered when the mean loss of an epoch stops improving: torch's
`ReduceLROnPlateau`, float for float.

The worker has no scheduler: a rule in the bundle and a state in each commit take its place.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


@dataclass(frozen=True, slots=True)
class PlateauRule:
    """The settings of a ReduceLROnPlateau; `min_lrs`: for each parameter group."""

    mode: Literal["min", "max"]
    factor: float
    patience: _Count
    threshold: float
    threshold_mode: Literal["rel", "abs"]
    cooldown: _Count
    min_lrs: tuple[float, ...]
    eps: float

    def is_better(self, metric: float, best: float) -> bool:
        """Return whether a metric is better than the best one by more than the threshold."""
        sign = 1.0 if self.mode == "max" else -1.0
        needed = best * (1.0 + sign * self.threshold) if self.threshold_mode == "rel" else best + sign * self.threshold
        return metric > needed if self.mode == "max" else metric < needed

    def lowered(self, rates: Sequence[float]) -> list[float]:
        """Return the learning rates after a plateau."""
        new = [max(rate * self.factor, least) for rate, least in zip(rates, self.min_lrs, strict=True)]
        return [lower if rate - lower > self.eps else rate for rate, lower in zip(rates, new, strict=True)]


class PlateauState:
    """The learning rates of the parameter groups, and what is known about the losses so far."""

    def __init__(self, rule: PlateauRule, rates: Sequence[float]) -> None:
        self._rule, self.rates = rule, [*rates]
        self._best = -math.inf if rule.mode == "max" else math.inf
        self._bad_epochs = self._cooldown = self._batches = 0
        self._total = 0.0
        """The sum of the losses of the epoch in progress."""

    def batch_done(self, loss: float) -> None:
        """Count a batch of the epoch in progress."""
        self._total, self._batches = self._total + loss, self._batches + 1

    def epoch_done(self) -> None:
        """Judge the mean loss of the epoch's batches, and lower the rates if there is a plateau."""
        metric, self._total, self._batches = self._total / self._batches, 0.0, 0
        if self._rule.is_better(metric, self._best):
            self._best, self._bad_epochs = metric, 0
        else:
            self._bad_epochs += 1
        if self._cooldown > 0:
            self._cooldown, self._bad_epochs = self._cooldown - 1, 0
        if self._bad_epochs > self._rule.patience:
            self.rates = self._rule.lowered(self.rates)
            self._cooldown, self._bad_epochs = self._rule.cooldown, 0

    def values(self) -> dict[str, Any]:
        """Return the values for `restore`, for a commit."""
        return {
            "rates": [*self.rates], "best": self._best, "bad_epochs": self._bad_epochs, "cooldown": self._cooldown,
            "total": self._total, "batches": self._batches,
        }  # fmt: skip

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore the state from values that it returned."""
        self.rates, self._best = [*values["rates"]], values["best"]
        self._bad_epochs, self._cooldown = values["bad_epochs"], values["cooldown"]
        self._total, self._batches = values["total"], values["batches"]
