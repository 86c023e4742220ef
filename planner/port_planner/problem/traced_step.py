"""From an observed step to an abstract problem, and from a schedule to the evictions after each operator.

No graph of values is needed: only operators with their seconds, and the storages that each reads, writes and creates.
The order is the program's own, so nothing is reordered and no update is sliced.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from port_planner.ir.costs import DeviceCosts
from port_planner.ir.traced import Departure, TracedOp, TracedStep
from port_planner.problem.problem import (
    GapDecision,
    Paging,
    Problem,
    Rematerialization,
    Schedule,
    Semantics,
    Stage,
    Tensor,
)

SMALLEST_DECIDED_BYTES = 64 * 1024
"""Bytes below which storages are not decided about, because transfers below 1 MiB lose most of the
bandwidth and gain nothing.
"""

MERGED_SHARE = 32
"""Share of the budget that the storages of consecutive operators may take for these to be merged into one stage."""

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TracedProblem:
    """A problem and its origin: the ops of each stage, the storage of each tensor."""

    step: TracedStep
    device: DeviceCosts
    problem: Problem
    ranges: tuple[tuple[int, int], ...]
    storages: tuple[int, ...]
    _uses: tuple[tuple[int, ...], ...]

    def without_intermediates(self, schedule: Schedule) -> Schedule:
        """Return the schedule with tensors paged that would need intermediates, because a program under
        `exec` has dropped those.
        """
        wanted = set(schedule.intermediates)
        choices = []
        for choice in schedule.choices:
            gap = self.problem.gaps[choice.gap]
            again = self.problem.tensors[gap.tensor].rematerializations
            if choice.decision is GapDecision.RECOMPUTE and (made := again[gap.version]) is not None:
                stage = choice.stage % self.problem.size
                if any((u, stage) in wanted for u, _ in made.inputs):
                    choice = replace(choice, decision=GapDecision.PAGE)
            choices.append(choice)
        return Schedule(tuple(choices))

    def moved_seconds(self, schedule: Schedule, written_bytes: int) -> float:
        """Return the seconds of reading and writing pages; the remains of a storage are not read again."""
        flash, read_bytes = self.device.flash, 0
        for choice in schedule.choices:
            tensor = self.problem.tensors[self.problem.gaps[choice.gap].tensor]
            if choice.decision is GapDecision.PAGE and any(paging.seconds_in > 0 for paging in tensor.paging):
                read_bytes += tensor.nbytes
        return read_bytes / flash.read_bytes_per_s + written_bytes / flash.write_bytes_per_s

    def departures(self, schedule: Schedule) -> tuple[Departure, ...]:
        """Return the evictions after each operator, in the order of the operators."""
        found = []
        for choice in schedule.choices:
            if choice.decision is GapDecision.KEEP:
                continue
            gap = self.problem.gaps[choice.gap]
            storage, last = self.storages[gap.tensor], self.ranges[gap.after][1]
            after = max(u for u in self._uses[storage] if u <= last)
            found.append(Departure(after, storage, choice.decision is GapDecision.RECOMPUTE))
        return tuple(sorted(found))


def traced_problem(
    step: TracedStep,
    device: DeviceCosts,
    *,
    tensor_bytes: int,
    deadline_s: float | None = None,
    write_limit_bytes: float | None = None,
) -> TracedProblem:
    """Return the problem of running `step` with at most `tensor_bytes` of its storages resident."""
    return _TraceBuilder(step, device, tensor_bytes).run(deadline_s, write_limit_bytes)


class _TraceBuilder:
    """Builds one problem: stages, tensors, and the bytes of everything else."""

    def __init__(self, step: TracedStep, device: DeviceCosts, tensor_bytes: int) -> None:
        self.step, self.device, self.tensor_bytes = step, device, tensor_bytes
        self.large = [s.nbytes >= SMALLEST_DECIDED_BYTES for s in step.storages]
        self.touched = [self._held_by(op) for op in step.ops]
        self.uses: list[list[int]] = [[] for _ in step.storages]
        self.writers: list[list[int]] = [[] for _ in step.storages]
        self.made = {s for op in step.ops for s in op.makes}
        for i, op in enumerate(step.ops):
            for s in self.touched[i]:
                self.uses[s].append(i)
            for s in dict.fromkeys((*op.writes, *op.makes)):
                self.writers[s].append(i)
        self.ranges = list(self._stages())
        self.stage_of = [t for t, (first, last) in enumerate(self.ranges) for _ in range(first, last + 1)]
        self.tensor_of: dict[int, int] = {}
        for s in range(len(step.storages)):
            if self._decided(s):
                self.tensor_of[s] = len(self.tensor_of)

    def _held_by(self, op: TracedOp) -> tuple[int, ...]:
        """Return the storages that an operator holds; those that do not fit with the others
        are processed tile by tile.
        """
        held = sorted(dict.fromkeys((*op.reads, *op.makes)), key=lambda s: self.step.storages[s].nbytes)
        while held and self._bytes(held) + op.workspace_bytes > self.tensor_bytes:
            held.pop()
        return tuple(held)

    def _bytes(self, storages: Sequence[int]) -> int:
        return sum(self.step.storages[s].nbytes for s in storages)

    def _stages(self) -> Iterator[tuple[int, int]]:
        """Yield first and last op of each stage."""
        first, together = 0, set[int]()
        for i, held in enumerate(self.touched):
            large = {s for s in held if self.large[s]}
            if large and together and self._bytes([*(together | large)]) * MERGED_SHARE > self.tensor_bytes:
                yield first, i - 1
                first, together = i, set()
            together |= large
        yield first, len(self.touched) - 1

    def _decided(self, s: int) -> bool:
        """Return whether a storage is large, idle somewhere, and both created and freed within the trace."""
        storage, uses = self.step.storages[s], self.uses[s]
        if not self.large[s] or not uses:
            return False
        if storage.persistent:
            return True
        return s in self.made and (self.stage_of[uses[0]] < self.stage_of[uses[-1]] or self._remains(s) is not None)

    def _end(self, s: int) -> int:
        return min(self.step.storages[s].ends, len(self.step.ops))

    def run(self, deadline_s: float | None, write_limit_bytes: float | None) -> TracedProblem:
        tensors = [self._tensor(s) for s in self.tensor_of]
        storages = list(self.tensor_of)
        for s in self.tensor_of:
            remains = self._remains(s)
            if remains is not None:
                tensors.append(remains)
                storages.append(s)
        problem = Problem(
            tuple(self._stage_costs()),
            tuple(tensors),
            self.tensor_bytes,
            deadline_s,
            Semantics.ELASTIC,
            self.device.static_watts,
            (self.device.flash.name,),
            write_limit_bytes,
            name="traced step",
        )
        return TracedProblem(
            self.step, self.device, problem, tuple(self.ranges), tuple(storages), tuple(map(tuple, self.uses))
        )

    def _tensor(self, s: int) -> Tensor:
        storage = self.step.storages[s]
        accesses = tuple(dict.fromkeys(self.stage_of[u] for u in self.uses[s]))
        writes = tuple(dict.fromkeys(self.stage_of[w] for w in self.writers[s] if self.stage_of[w] in accesses))
        if not storage.persistent and (not writes or writes[0] != accesses[0]):
            writes = (accesses[0], *writes)
        again = () if storage.persistent else (self._rematerialization(s), *[None] * (len(writes) - 1))
        return Tensor(
            f"storage {s}", storage.nbytes, accesses, writes, storage.persistent, again, (self._paging(storage.nbytes),)
        )

    def _remains(self, s: int) -> Tensor | None:
        """Return a storage from its last use to its end as a separate tensor, which need not return once it is evicted.

        At its first stage the storage itself is counted, and at its last nothing is; `_stage_costs` corrects both.
        """
        storage = self.step.storages[s]
        if storage.persistent or not self.uses[s]:
            return None
        last, end = self.stage_of[self.uses[s][-1]], self._end_stage(s)
        if end < last + 2:
            return None
        flash, nbytes = self.device.flash, storage.nbytes
        out = Paging(0, flash.write_seconds(nbytes), 0.0, nbytes * flash.written_cost_joules_per_byte, 0.0)
        return Tensor(f"remains of storage {s}", nbytes, (last, end), (last,), paging=(out,))

    def _end_stage(self, s: int) -> int:
        end = self._end(s)
        return self.stage_of[end] if end < len(self.step.ops) else len(self.ranges)

    def _paging(self, nbytes: int) -> Paging:
        flash = self.device.flash
        return Paging(
            0,
            flash.write_seconds(nbytes),
            flash.read_seconds(nbytes),
            nbytes * flash.written_cost_joules_per_byte,
            nbytes * flash.read_joules_per_byte,
        )

    def _rematerialization(self, s: int) -> Rematerialization | None:
        """Return how a storage's first contents can be recomputed, or None."""
        born = self.uses[s][0]
        op = self.step.ops[born]
        if not op.repeatable or op.makes != (s,) or self._changes_within(s, born):
            return None
        inputs = []
        for u in op.reads:
            if u in self.tensor_of and u != s and not self._changes_within(u, born):
                stages = dict.fromkeys(self.stage_of[w] for w in self.writers[u] if w <= born)
                inputs.append((self.tensor_of[u], len(stages) - 1))
            elif not self._stays(u):
                return None
        joules = (self.device.compute_watts + self.device.static_watts) * op.seconds
        return Rematerialization(op.seconds, joules, tuple(sorted(inputs)), op.workspace_bytes)

    def _changes_within(self, s: int, op: int) -> bool:
        """Return whether a storage changes after `op` within its stage, so that the contents in
        between are never used later.
        """
        return any(op < w <= self.ranges[self.stage_of[op]][1] for w in self.writers[s])

    def _stays(self, s: int) -> bool:
        """Return whether a storage is small, unchanged and resident all the time."""
        return not self.large[s] and self.step.storages[s].persistent and not self.writers[s]

    def _stage_costs(self) -> Iterator[Stage]:
        held, twice = self._undecided(), [0] * (len(self.ranges) + 1)
        for s in self.tensor_of:
            if self._remains(s) is not None:
                for t in (self.stage_of[self.uses[s][-1]], self._end_stage(s)):
                    twice[t] += self.step.storages[s].nbytes
        watts = self.device.compute_watts + self.device.static_watts
        for t, (first, last) in enumerate(self.ranges):
            fixed = int(held[first : last + 1].min())
            work = max(int(held[i]) + self.step.ops[i].workspace_bytes for i in range(first, last + 1)) - fixed
            seconds = sum(op.seconds for op in self.step.ops[first : last + 1])
            yield Stage(f"{first} to {last}", seconds, watts * seconds, work, fixed - twice[t])
        yield Stage("end", 0.0, 0.0, 0, int(held[-1]) - twice[-1])

    def _undecided(self) -> Counts:
        """Return the bytes per op that no decision changes."""
        n = len(self.step.ops)
        change = np.zeros(n + 1, dtype=np.int64)
        for s, storage in enumerate(self.step.storages):
            if not self.uses[s]:
                continue
            first, end = (0, n) if storage.persistent else (self.uses[s][0], max(self._end(s), self.uses[s][-1] + 1))
            for start, stop in self._outside(s, first, end):
                change[start] += storage.nbytes
                change[stop] -= storage.nbytes
        return np.cumsum(change)[:n]

    def _outside(self, s: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the spans of a storage's life that no tensor represents."""
        if s not in self.tensor_of:
            yield first, end
        elif not self.step.storages[s].persistent and self._remains(s) is None:
            yield min(self.ranges[self.stage_of[self.uses[s][-1]]][1] + 1, end), end
