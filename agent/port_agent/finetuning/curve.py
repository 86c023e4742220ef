"""The losses over the course of a fine-tuning: of each update, and of held-out data at intervals.

Does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 40

CURVE = "curve.csv"
"""File name in the result's directory."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The mean held-out loss after a number of updates."""

    updates: int
    loss: float


@dataclass(slots=True)
class Curve:
    """`losses`: of the updates, from the first; `evaluations`: in order, the first before any update."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[CurvePoint] = field(default_factory=list)

    @property
    def best(self) -> CurvePoint | None:
        """The evaluation with the lowest loss, the first of several equal ones; None if there is none."""
        return min(self.evaluations, key=lambda one: (one.loss, one.updates), default=None)

    @property
    def best_trained(self) -> CurvePoint | None:
        """The best evaluation after at least one update; None if there is none."""
        trained = (one for one in self.evaluations if one.updates)
        return min(trained, key=lambda one: (one.loss, one.updates), default=None)

    def at(self, updates: int) -> CurvePoint | None:
        """Return the evaluation after this number of updates."""
        return next((one for one in self.evaluations if one.updates == updates), None)

    def is_over(self, patience: int | None) -> bool:
        """Return whether none of the last `patience` evaluations was better than the best before them."""
        if patience is None or self.best is None:
            return False
        return len(self.evaluations) - 1 - self.evaluations.index(self.best) >= patience

    def csv(self) -> str:
        """Return a table with a line for each update, and the held-out loss if it was measured there."""
        held_out = {one.updates: repr(one.loss) for one in self.evaluations}
        first = [f"0,,{held_out[0]}\n"] if 0 in held_out else []
        lines = [f"{n},{loss!r},{held_out.get(n, '')}\n" for n, loss in enumerate(self.losses, 1)]
        return "".join(("updates,loss,held_out_loss\n", *first, *lines))


def bars(losses: Sequence[float]) -> str:
    """Return numbers as bars between the lowest and the highest; long lists are thinned."""
    shown = (
        [losses[place * len(losses) // _MAX_BARS] for place in range(_MAX_BARS)] if len(losses) > _MAX_BARS else losses
    )
    lowest, highest = min(shown, default=0.0), max(shown, default=0.0)
    span = highest - lowest or 1.0
    return "".join(_BARS[round((loss - lowest) / span * (len(_BARS) - 1))] for loss in shown)
