"""What steps leave to later ones outside of the model: tensors that the program kept, whatever they are called.

A bundle repeats one recording, and a checkpoint has the model, the optimizer and torch's generators: an average of weights in a list, a
teacher whose weights are exchanged, a queue of past outputs would stay as they were recorded, or be lost where training is cut. Their contents need not
show that in the first steps: an average of weights that have not changed yet is those weights.
"""

import gc
from collections.abc import Iterable, Set

from torch.multiprocessing.reductions import StorageWeakRef


class StepResults:
    """The storages that operators made in recorded steps, step by step, as long as somebody holds them."""

    def __init__(self) -> None:
        self._steps: list[dict[int, StorageWeakRef]] = []

    def add(self, made: Iterable[StorageWeakRef]) -> None:
        """Take in what a step made."""
        self._steps.append({reference.cdata: reference for reference in made})

    def hold(self, storage: int) -> bool:
        """Say whether a step made this storage, known by its address."""
        return any(storage in step for step in self._steps)

    def are_gathered(self, known: Set[int]) -> bool:
        """Say whether storages of two steps or more are there at once, but for those that are `known` to the next, as the model's are.

        What each step puts in the place of the one before is no more than looked at, unless a step reads it; of what is gathered any may be
        read later.
        """
        if self._held(known) > 1:
            gc.collect()  # what only refers to itself
        return self._held(known) > 1

    def _held(self, known: Set[int]) -> int:
        self._steps = [left for step in self._steps if (left := {s: r for s, r in step.items() if not r.expired()})]
        return sum(not step.keys() <= known for step in self._steps)
