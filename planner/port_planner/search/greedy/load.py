"""The bytes of each stage of a step under the decisions made so far."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from port_planner.problem.problem import Choice, GapDecision, Problem

Bytes = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shortage:
    """Bytes above the limit at each stage, and the weight of each byte there; `urgency` None:
    all have the same weight.
    """

    over: Bytes
    urgency: Bytes | None

    @cached_property
    def short_before(self) -> npt.NDArray[np.int64]:
        """How many of the stages before each one are short of memory, with one more entry for the total."""
        return np.concatenate(([0], np.cumsum(self.over > 0)))

    def touches(self, where: list[slice]) -> bool:
        """Return whether memory is short in any of these stages."""
        before = self.short_before
        return any(before[part.stop] > before[part.start] for part in where)

    def covered(self, where: slice | list[int], nbytes: int) -> float:
        """Return how many of the missing byte-stages `nbytes` fewer in these stages would cover."""
        covered = np.minimum(self.over[where], nbytes)
        return float(np.add.reduce(covered if self.urgency is None else covered * self.urgency[where]))


class StageLoad:
    """Bytes per stage, shape (stages,); `before`: while its rematerializations run, `after`:
    while its own operators do.
    """

    def __init__(self, problem: Problem) -> None:
        """Start with every idle gap kept; gaps after the last use of a tensor hold nothing."""
        self.limit = float(problem.ram_bytes if problem.ram_bytes is not None else 1 << 62)
        self.after = np.array([float(s.fixed_bytes + s.workspace_bytes) for s in problem.stages])
        self.before = np.array([float(s.fixed_bytes) for s in problem.stages])
        for tensor in problem.tensors:
            where = list(tensor.accesses)
            self.after[where] += tensor.nbytes
            self.before[where] += tensor.nbytes
            if tensor.birth >= 0:
                self.before[tensor.birth] -= tensor.nbytes
        for gap in problem.gaps:
            if not gap.dead:
                self.hold(step_slices(gap.after + 1, gap.before, problem.size), problem.tensors[gap.tensor].nbytes)

    def hold(self, where: list[slice], nbytes: float) -> None:
        """Add `nbytes` (or remove them, if negative) in these stages, from start to end."""
        for part in where:
            self.after[part] += nbytes
            self.before[part] += nbytes

    def peaks(self) -> Bytes:
        """Return the most that each stage takes."""
        peaks: Bytes = np.maximum(self.after, self.before)
        return peaks

    def shortage(self, emphasis: float = 0.0) -> "Shortage":
        """Return the missing bytes at each stage; `emphasis`: how much more they weigh where most is missing."""
        over: Bytes = np.maximum(self.peaks() - self.limit, 0.0)
        return Shortage(over, (over / (float(over.max()) or 1.0)) ** emphasis if emphasis else None)

    def allows(self, stage: int, more_bytes: float) -> bool:
        """Return whether rematerializations may take this much more at a stage: it fits, or it is no more than now."""
        present = float(self.before[stage])
        return present + more_bytes <= max(self.limit, present, float(self.after[stage]))


class PageLimits:
    """Bytes of pages at each stage in targets that are memory, copies of persistent tensors included."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.held = {
            d: np.zeros(problem.size) for d in range(len(problem.targets)) if problem.limit_bytes(d) is not None
        }
        self.pages: dict[int, Counter[int]] = defaultdict(Counter)
        """Persistent tensor -> target -> number of gaps in which it is paged there."""

    def fits(self, choice: Choice) -> bool:
        """Return whether a page fits its target.

        A medium has space for all pages. A tensor with a copy in memory has no page elsewhere.
        """
        tensor = self.problem.gaps[choice.gap].tensor
        used = {d for d, count in self.pages[tensor].items() if count} if self.held else set()
        if used - {choice.target} and not self.held.keys().isdisjoint({choice.target, *used}):
            return False
        if choice.target not in self.held or used:
            return True
        limits, nbytes = self.problem.limit_bytes(choice.target) or 0, self.problem.tensors[tensor].nbytes
        held = self.held[choice.target]
        return all((held[part] + nbytes <= limits).all() for part in self._stages(choice))

    def hold(self, choice: Choice, times: int) -> None:
        """Reserve the space of a page (`times` 1), or release it (-1)."""
        if choice.decision is not GapDecision.PAGE or not self.held:
            return
        i = self.problem.gaps[choice.gap].tensor
        if self.problem.tensors[i].persistent:
            before = self.pages[i][choice.target]
            self.pages[i][choice.target] += times
            if min(before, before + times) > 0:
                return
        if choice.target in self.held:
            for part in self._stages(choice):
                self.held[choice.target][part] += times * self.problem.tensors[i].nbytes

    def _stages(self, choice: Choice) -> list[slice]:
        if self.problem.tensors[self.problem.gaps[choice.gap].tensor].persistent:
            return [slice(0, self.problem.size)]
        return step_slices(self.problem.gaps[choice.gap].after, choice.stage, self.problem.size)


def step_slices(start: int, stop: int, size: int) -> list[slice]:
    """Return the stages start..stop-1, which may extend past the step's end, as slices."""
    if stop <= size:
        return [slice(start, stop)] if start < stop else []
    return [p for p in (slice(start, size), slice(0, stop - size)) if p.start < p.stop]
