"""Set weights of small magnitude to zero after each update, by a job's schedule
(`port_planner.ir.bundle.pruning_schedule`).

A threshold for each weight tensor keeps zeros at zero. It is determined every few updates and stored with the commit.
There are no masks, and a killed training continues with the same numbers.
"""

from collections.abc import Iterable

import torch

from port_agent.training.state.resident_state import Persistents
from port_planner.ir.bundle.pruning_schedule import Pruning

_CLASS_BITS = 15
"""Number of low bits of a float's magnitude that its class ignores; classes are 1/256 of their magnitude wide."""
_CLASSES = 1 << 16


class WeightPruning:
    """The pruning of one training.

    `first`: updates up to this one are not pruned, because they are compared with plain PyTorch's.
    """

    def __init__(self, pruning: Pruning, first: int = 0) -> None:
        self.pruning, self.first = pruning, first
        self.thresholds: dict[str, float] = {}
        """Weight's key -> the magnitude up to which its items are set to zero."""

    def updated(self, update: int, keys: Iterable[str], persistents: Persistents) -> None:
        """Prune these weights after `update` updates, wherever they are stored."""
        if update <= max(self.pruning.begin, self.first):
            return
        for key in keys:
            if self.pruning.looks(update):
                self.thresholds[key] = magnitude_below(persistents, key, self.pruning.sparsity_at(update))
            if key in self.thresholds:
                self._prune(persistents, key)

    def _prune(self, persistents: Persistents, key: str) -> None:
        threshold = self.thresholds[key]
        persistents.for_each_chunk(key, lambda chunk: _zero_up_to(chunk, threshold), changes=True)


def _zero_up_to(chunk: torch.Tensor, threshold: float) -> None:
    chunk.masked_fill_(chunk.abs() <= threshold, 0.0)


def magnitude_below(persistents: Persistents, key: str, share: float) -> float:
    """Return a magnitude that at least this share of a weight's items do not exceed, accurate to 1/256."""
    counts = torch.zeros(_CLASSES, dtype=torch.int64)

    def count(chunk: torch.Tensor) -> None:
        bits = chunk.cpu().float().abs().view(torch.int32)
        counts.add_(torch.bincount(bits >> _CLASS_BITS, minlength=_CLASSES))

    persistents.for_each_chunk(key, count, changes=False)
    highest = int((counts.cumsum(0) >= share * int(counts.sum())).nonzero()[0])
    bits = torch.tensor(((highest + 1) << _CLASS_BITS) - 1, dtype=torch.int32)
    return float(bits.view(torch.float32))
