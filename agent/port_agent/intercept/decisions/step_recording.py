"""One step of a program in the planner's form: operators with their seconds, storages with their lives."""

import contextlib
from collections.abc import Sequence

from port_agent.intercept.residency.storages import Storage
from port_agent.intercept.residency.trace import SegmentPlan, Trace
from port_planner.ir.traced import Departure, TracedOp, TracedStep, TracedStorage


class StepRecording:
    """Records consecutive segments, `expected` ones if these are known already.

    Sets `broken` if the program does something else.
    """

    def __init__(self, expected: Sequence[Trace] = ()) -> None:
        self.expected = tuple(expected)
        self.segments: tuple[Trace, ...] = ()
        """The segments that have ended."""
        self.broken = False
        self.tensor_bytes: float = float("inf")
        """The smallest memory for tensors during the recording."""
        self._ops: list[TracedOp] = []
        self._touched: list[tuple[int, ...]] = []
        self._places: list[tuple[int, int]] = []
        self._index: dict[int, int] = {}
        self._sizes: list[int] = []
        self._born: set[int] = set()
        self._ends: dict[int, int] = {}

    def __len__(self) -> int:
        """The number of operators."""
        return len(self._ops)

    @property
    def complete(self) -> bool:
        return self.expected == self.segments != ()

    def add(
        self,
        inputs: Sequence[Storage],
        made: Sequence[Storage],
        written: Sequence[Storage],
        seconds: float,
        workspace_bytes: int,
        *,
        repeatable: bool,
    ) -> None:
        """Record an operator that ran."""
        reads, makes = self._indices(inputs), self._indices(made)
        self._born.update(makes)
        self._ops.append(TracedOp(seconds, workspace_bytes, reads, self._indices(written), makes, repeatable))
        self._touched.append(tuple(self._index[s.number] for s in (*inputs, *made)))
        segment = len(self.segments)
        position = self._places[-1][1] + 1 if self._places and self._places[-1][0] == segment else 0
        self._places.append((segment, position))

    def _indices(self, storages: Sequence[Storage]) -> tuple[int, ...]:
        found = []
        for storage in dict.fromkeys(storages):
            index = self._index.setdefault(storage.number, len(self._sizes))
            if index == len(self._sizes):
                self._sizes.append(0)
            self._sizes[index] = storage.nbytes
            found.append(index)
        return tuple(found)

    def ended(self, storage: Storage) -> None:
        """Record that the program released a storage."""
        index = self._index.get(storage.number)
        if index is not None:
            self._ends[index] = len(self._ops)

    def end_segment(self, trace: Trace) -> None:
        """Record that a segment ended."""
        self.segments += (trace,)
        self.broken = bool(self.expected) and self.expected[: len(self.segments)] != self.segments

    def step(self) -> TracedStep:
        """Return the recorded step."""
        count = len(self._ops)
        storages = [
            TracedStorage(nbytes, index not in self._born and index not in self._ends, self._ends.get(index, count))
            for index, nbytes in enumerate(self._sizes)
        ]
        return TracedStep(tuple(self._ops), tuple(storages))

    def segment_plans(self, departures: Sequence[Departure]) -> list[SegmentPlan]:
        """Return a plan's decisions for each segment."""
        plans = [SegmentPlan() for _ in self.segments]
        births = {index: op for op, made in enumerate(self._ops) for index in made.makes}
        for departure in departures:
            segment, position = self._places[departure.after]
            operands = [k for k, index in enumerate(self._touched[departure.after]) if index == departure.storage]
            plans[segment].leaving.setdefault(position, {}).update(dict.fromkeys(operands, departure.recomputed))
            if departure.recomputed:
                with contextlib.suppress(KeyError):  # seen before the step
                    segment, position = self._places[births[departure.storage]]
                    plans[segment].remade.add(position)
        return plans
