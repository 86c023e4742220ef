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
        self._steps: list[dict[int, tuple[StorageWeakRef, str]]] = []

    def add(self, made: Iterable[tuple[StorageWeakRef, str]]) -> None:
        """Take in what a step made, and in which line of the program; "" where that is not known."""
        self._steps.append({reference.cdata: (reference, line) for reference, line in made})

    def hold(self, storage: int) -> bool:
        """Return whether a step made this storage, known by its address."""
        return any(storage in step for step in self._steps)

    def gathered(self, known: Set[int]) -> list[str] | None:
        """Return the lines that made storages of which those of two steps or more are there at once; None where they are not.

        But for those that are `known` to the next, as the model's are. What each step puts in the place of the one before is no more than looked at, unless a step reads it; of what is gathered any may be
        read later.
        """
        if len(self._held(known)) > 1:
            gc.collect()  # what only refers to itself
        held = self._held(known)
        return sorted({line for lines in held for line in lines if line}) if len(held) > 1 else None

    def _held(self, known: Set[int]) -> list[set[str]]:
        """Return the lines of what is there of each step that anything is left of."""
        there = [{s: made for s, made in step.items() if not made[0].expired()} for step in self._steps]
        self._steps = [left for left in there if left]
        held = ({line for s, (_, line) in left.items() if s not in known} for left in self._steps)
        return [lines for lines in held if lines]
