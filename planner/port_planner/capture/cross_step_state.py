"""State that steps leave to later ones outside the model: tensors that the program keeps anywhere.

A bundle repeats one recording, and a checkpoint has the model, the optimizer and torch's generators. So other state
would stay as recorded, or be lost when training is interrupted: an average of weights in a list, a teacher whose
weights are exchanged, past outputs. Its contents need not show this in the first steps: an average of weights that have
not changed yet equals those weights.
"""

import gc
from collections.abc import Iterable, Set

from torch.multiprocessing.reductions import StorageWeakRef


class StepResults:
    """The storages that operators created in recorded steps, step by step, while anything still refers to them."""

    def __init__(self) -> None:
        self._steps: list[dict[int, tuple[StorageWeakRef, str]]] = []
        self._constants: list[StorageWeakRef] = []

    def add(self, made: Iterable[tuple[StorageWeakRef, str]], constants: Iterable[StorageWeakRef] = ()) -> None:
        """Register the storages that a step created, with the line of the program that created them; "" if unknown.

        `constants`: further storages that depend neither on the batch, nor on the model, nor on random numbers. A
        program may keep them, because they are the same in every step.
        """
        self._steps.append({reference.cdata: (reference, line) for reference, line in made})
        self._constants += constants

    def forget_expired(self) -> None:
        """Forget the steps of which no storage remains."""
        self._steps = [step for step in self._steps if any(not made.expired() for made, _ in step.values())]

    def hold(self, storage: int) -> bool:
        """Return whether a step created this storage, identified by its address."""
        return any(storage in step for step in self._steps)

    def kept(self) -> bool:
        """Return whether the program still has any tensor that a step created."""
        return self.kept_constants() or bool(self._held(frozenset()))

    def kept_constants(self) -> bool:
        """Return whether the program still has constants that a step created, such as a mask
        that is created only once.
        """
        self._constants = [made for made in self._constants if not made.expired()]
        return bool(self._constants)

    def gathered(self, known: Set[int]) -> list[str] | None:
        """Return the lines whose storages from two or more steps exist at once; None if there are none.

        Storages `known` to the next step, such as the model's, do not count. A value that each step replaces is only
        inspected, unless a step reads it; gathered values may be read later.
        """
        if len(self._held(known)) > 1:
            gc.collect()  # what only refers to itself
        held = self._held(known)
        return sorted({line for lines in held for line in lines if line}) if len(held) > 1 else None

    def _held(self, known: Set[int]) -> list[set[str]]:
        """Return, for each step with surviving storages, the lines that created them."""
        there = [{s: made for s, made in step.items() if not made[0].expired()} for step in self._steps]
        self._steps = [left for left in there if left]
        held = ({line for s, (_, line) in left.items() if s not in known} for left in self._steps)
        return [lines for lines in held if lines]
