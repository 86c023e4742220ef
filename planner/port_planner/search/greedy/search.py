"""A valid schedule in a fraction of a second, without a solver: relieve the fullest stages for the least energy.

While memory is short anywhere, the gap that costs the least joules per byte-stage of missing memory is bridged by
paging or rematerializing. Afterwards, decisions that proved unnecessary or expensive are undone. Rematerializations
include their intermediates, so that every intermediate state is a consistent schedule.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from port_planner.problem.problem import Choice, GapDecision, Problem, Schedule
from port_planner.search.greedy.closures import MAX_CHAIN, Closures
from port_planner.search.greedy.decisions import Decisions
from port_planner.search.greedy.load import Shortage, StageLoad
from port_planner.search.greedy.search_steps import Additions, SearchStep, SearchSteps

EMPHASES = (0.5, 1.0, 4.0)

LARGE_STAGES, LARGE_TOLERANCE = 1500, 0.05
"""Number of stages beyond which a search step is made if it is within this share of the cheapest, because
equal blocks tie all the time.
"""
TOLERANCE = 1e-9
"""Relative difference below which only rounding can separate a search step from the cheapest."""


@dataclass(slots=True)
class Greedy:
    """The result of the greedy search. `schedule` is None if even paging everything does not fit.

    `needed_bytes`: the least budget for which this search finds a schedule; `stage`: where that much is needed.
    """

    schedule: Schedule | None
    needed_bytes: int
    stage: int


class GreedySearch:
    """One search, which chooses the next search step to make or to undo."""

    def __init__(
        self,
        problem: Problem,
        *,
        paging: bool = True,
        recompute: bool = True,
        packing: bool = True,
        start: Schedule | None = None,
        emphasis: float = 0.0,
    ) -> None:
        """`start`: decisions with which to begin. `emphasis`: how much more relief weighs where memory is shortest."""
        self.problem, self.emphasis = problem, emphasis
        self.paging, self.recompute, self.packing = paging, recompute, packing
        self.tolerance = LARGE_TOLERANCE if problem.size > LARGE_STAGES else TOLERANCE
        self.load, self.added = StageLoad(problem), Additions()
        self.decisions = Decisions(problem)
        self.closures = Closures(problem, self.decisions)
        self.steps = SearchSteps(problem, self.decisions, self.closures, self.load, self.added)
        self.made: dict[int, SearchStep] = {}
        """Gap -> the search step that bridged it."""
        self.sliced: set[int] = set()
        self.barred: set[tuple[int, GapDecision]] = set()
        """Gaps, and the ways of packing them that prevented a schedule."""
        if start is not None:
            self._adopt(start)

    def _adopt(self, start: Schedule) -> None:
        """Start with the decisions of `start` instead of keeping everything; what they need is determined again."""
        problem, self.closures.chain_limit = self.problem, max(MAX_CHAIN, len(start.intermediates))
        for choice in start.choices:
            gap = problem.gaps[choice.gap]
            if choice.decision is GapDecision.PAGE:
                joules, io_seconds = self.steps.page_cost(choice.gap, self.decisions.paging_of(choice))
                self._make(SearchStep(choice, joules, 0.0, io_seconds))
            elif choice.decision is GapDecision.RECOMPUTE:
                rematerialization = problem.tensors[gap.tensor].rematerialization(gap.version)
                if rematerialization is not None:
                    self._make(SearchStep(choice, rematerialization.joules, rematerialization.seconds, 0.0))
            elif (
                choice.decision is GapDecision.PACK
                and (packing := problem.tensors[gap.tensor].packing(gap.version)) is not None
            ):
                self._make(SearchStep(choice, packing.joules, packing.seconds, 0.0))
            elif choice.decision is GapDecision.PACK_PAGE and (
                packing := problem.tensors[gap.tensor].packing(gap.version)
            ):
                page = self.decisions.paging_of(choice)
                joules, io_seconds = page.joules_in + page.joules_out, page.seconds_in + page.seconds_out
                self._make(SearchStep(choice, packing.joules + joules, packing.seconds, io_seconds))
        for stage in list(self.closures.roots):
            self._refresh(stage)
            self.added.seconds += self.closures.cost(self.closures.intermediates[stage]).seconds

    # -- what a search step changes

    def _make(self, step: SearchStep) -> None:
        g, gap = step.choice.gap, self.problem.gaps[step.choice.gap]
        if self._wears(step.choice):
            self.added.written_bytes += self.decisions.paged_bytes(step.choice)
        self.decisions.choices[g], self.made[g] = step.choice, step
        self._free(step.choice, 1)
        if step.choice.decision is GapDecision.RECOMPUTE:
            self.closures.roots[step.choice.stage % self.problem.size][gap.tensor] = gap.version
        for stage in step.closures:
            self._refresh(stage)
        self.added.seconds += step.seconds
        self.added.io_seconds += step.io_seconds

    def _take_back(self, step: SearchStep) -> None:
        choice, gap = step.choice, self.problem.gaps[step.choice.gap]
        del self.decisions.choices[choice.gap], self.made[choice.gap]
        if self._wears(choice):
            self.added.written_bytes -= self.decisions.paged_bytes(choice)
        self._free(choice, -1)
        touched = {
            stage
            for stage, found in self.closures.intermediates.items()
            if gap.tensor in found and self.problem.gap_at(gap.tensor, stage) == choice.gap
        }
        if choice.decision is GapDecision.RECOMPUTE:
            at = choice.stage % self.problem.size
            del self.closures.roots[at][gap.tensor]
            touched.add(at)
        for stage in touched:
            self._refresh(stage)
        self.added.seconds -= step.seconds
        self.added.io_seconds -= step.io_seconds

    def _free(self, choice: Choice, times: int) -> None:
        """Apply a choice (`times` 1), or undo it (-1)."""
        gap, packed = self.problem.gaps[choice.gap], times * self.decisions.packed_bytes(choice)
        nbytes = times * self.problem.tensors[gap.tensor].nbytes
        self.steps.limit_bytes.hold(choice, times)
        self.load.hold(self.decisions.freed(choice), times * self.decisions.held_bytes(choice) - nbytes)
        buffer = times * self.decisions.paged_bytes(choice)
        self.load.hold([slice(s, s + 1) for s in self.decisions.buffers(choice)], buffer)
        self.load.after[gap.after] += packed
        self.load.before[choice.stage % self.problem.size] += packed

    def _wears(self, choice: Choice) -> bool:
        """Return whether a choice writes contents to a medium on which no other page has them."""
        if choice.decision is GapDecision.PACK_PAGE:
            return True
        paged = choice.decision is GapDecision.PAGE and self.problem.limit_bytes(choice.target) is None
        return paged and self.decisions.writes_first(choice.gap)

    def _refresh(self, stage: int) -> None:
        self.load.before[stage] += self.closures.refresh(stage)

    # -- the search

    def run(self) -> Greedy:
        """Return the schedule that was found, or how much memory the step would need."""
        feasible = self._relieve()
        if not feasible and self.paging:
            self._use_slices()
            feasible = self._relieve()
        peaks = self.load.peaks()
        stage = int(np.argmax(peaks))
        needed_bytes = round(float(peaks[stage]))
        if not feasible:
            return Greedy(None, needed_bytes, stage)
        self._drop_needless()
        return Greedy(self.schedule(), needed_bytes, stage)

    def _relieve(self) -> bool:
        """Make search steps until nothing exceeds the limit; return False if no remaining search step helps.

        No other search step can remove the bytes of a packed form. If that blocks the search, the largest packings of
        the fullest stage are undone, enough to free the missing bytes.
        """
        while not self._continue():
            peaks = self.load.peaks()
            stage = int(np.argmax(peaks))
            packed = sorted(self._packed_at(stage), key=self._packed_bytes, reverse=True)
            if not packed:
                return False
            missing_bytes = float(peaks[stage]) - self.load.limit
            before = itertools.accumulate((self._packed_bytes(step) for step in packed), initial=0)
            for step in [step for step, held in zip(packed, before, strict=False) if held < missing_bytes]:
                self._take_back(step)
                self.barred.add((step.choice.gap, step.choice.decision))
        return True

    def _packed_bytes(self, step: SearchStep) -> int:
        return self.decisions.packed_bytes(step.choice)

    def _packed_at(self, stage: int) -> list[SearchStep]:
        """Return the search steps whose packed form takes memory at a stage: while it waits, or is
        packed, unpacked or transferred.
        """
        return [step for step in self.made.values() if stage in self.decisions.packed_stages(step.choice)]

    def _continue(self) -> bool:
        """Make search steps, the cheapest for their relief first; return False if no remaining search step helps."""
        short = self.load.shortage(self.emphasis)
        heap: list[tuple[float, int]] = []
        for g, gap in enumerate(self.problem.gaps):
            movable = not gap.dead and g not in self.made and not self.problem.tensors[gap.tensor].pinned
            if movable and short.touches(self.decisions.spans[g]):
                heap.append((0.0, g))
        heapq.heapify(heap)
        while heap and short.over.any():
            key, g = heapq.heappop(heap)
            best = self._best_step(g, short)
            if best is None:
                continue
            if heap and best[0] > heap[0][0] * (1 + self.tolerance) and best[0] > key:
                heapq.heappush(heap, (best[0], g))
                continue
            self._make(best[1])
            short = self.load.shortage(self.emphasis)
        return not short.over.any()

    def _best_step(self, g: int, short: Shortage) -> tuple[float, SearchStep] | None:
        if not short.touches(self.decisions.spans[g]):
            return None
        best: tuple[float, SearchStep] | None = None
        for step in self._open_steps(g):
            relief = self._relief(step.choice, short)
            price = max(self.price(step), 0.0)
            if relief > 0 and (best is None or price / relief < best[0]):
                best = (price / relief, step)
        return best

    def _open_steps(self, g: int) -> Iterator[SearchStep]:
        steps = self.steps.of(g, paging=self.paging, recompute=self.recompute, packing=self.packing)
        return (step for step in steps if (g, step.choice.decision) not in self.barred)

    def price(self, step: SearchStep) -> float:
        """Return the joules that a search step costs."""
        return step.joules

    def _relief(self, choice: Choice, short: Shortage) -> float:
        """Return how many of the missing byte-stages a choice covers, minus those that its transfers take."""
        nbytes = self.problem.tensors[self.problem.gaps[choice.gap].tensor].nbytes
        packed = self.decisions.packed_bytes(choice)
        held = nbytes - self.decisions.held_bytes(choice)
        relief = sum(short.covered(part, held) for part in self.decisions.freed(choice))
        if packed:
            relief -= short.covered([self.problem.gaps[choice.gap].after], packed)
        buffers = self.decisions.buffers(choice)
        return relief - short.covered(buffers, self.decisions.paged_bytes(choice)) if buffers else relief

    def _use_slices(self) -> None:
        """Slice the updates at stages that stay too full, with their members paged in before and out after."""
        over = self.load.shortage().over
        for k, slicing in enumerate(self.problem.slicings):
            if not over[slicing.stage]:
                continue
            if not all(self._paged_around(i, slicing.stage) for i in slicing.members):
                continue
            self.sliced.add(k)
            members = sum(self.problem.tensors[i].nbytes for i in slicing.members)
            self.load.after[slicing.stage] -= slicing.saved_bytes + members - slicing.buffer_bytes
            self.load.before[slicing.stage] -= members

    def _paged_around(self, tensor: int, stage: int) -> bool:
        """Page the gaps on both sides of `stage`; return False if a neighbouring use or a
        rematerialization prevents that.
        """
        gaps = self.problem.gaps
        sides = [
            g for g in self.problem.gaps_of[tensor] if stage in (gaps[g].after, gaps[g].before % self.problem.size)
        ]
        needed = 1 if len(self.problem.tensors[tensor].accesses) == 1 else 2
        if len(sides) < needed:
            return False
        for g in sides:
            end, choice = gaps[g].before, self.decisions.choices.get(g)
            if choice is None:
                whole = (
                    m for m in self._open_steps(g) if m.choice.decision is GapDecision.PAGE and m.choice.stage == end
                )
                step = min(whole, key=self.price, default=None)
                if step is None:
                    return False
                self._make(step)
            elif choice.decision is not GapDecision.PAGE or choice.stage != end:
                return False
        return True

    def _drop_needless(self) -> None:
        """Undo search steps that proved unnecessary, the costliest first."""
        locked = {g for k in self.sliced for i in self.problem.slicings[k].members for g in self.problem.gaps_of[i]}
        for g, step in sorted(self.made.items(), key=lambda item: -item[1].joules):
            if g in locked or step.joules <= 0:
                continue
            nbytes = self.problem.tensors[self.problem.gaps[g].tensor].nbytes - self.decisions.held_bytes(step.choice)
            peaks = self.load.peaks()
            peaks[self.decisions.buffers(step.choice)] -= self.decisions.paged_bytes(step.choice)
            if all((peaks[part] + nbytes <= self.load.limit).all() for part in self.decisions.freed(step.choice)):
                self._take_back(step)

    def schedule(self) -> Schedule:
        """Return the current decisions."""
        intermediates = tuple(sorted((i, s) for s, found in self.closures.intermediates.items() for i in found))
        choices = self.decisions.choices
        return Schedule(tuple(choices[g] for g in sorted(choices)), intermediates, tuple(sorted(self.sliced)))


def greedy(problem: Problem, *, paging: bool = True, recompute: bool = True, packing: bool = True) -> Greedy:
    """Return a schedule of `problem` within its budgets, found without a solver.

    Rematerializations can lead into a dead end, if their inputs hold what they should free. Paging alone cannot, so it
    is tried next if both are allowed.
    """
    found = GreedySearch(problem, paging=paging, recompute=recompute, packing=packing).run()
    if found.schedule is None and paging and recompute:
        second = GreedySearch(problem, paging=True, recompute=False, packing=False).run()
        return second if second.schedule is not None or second.needed_bytes < found.needed_bytes else found
    return found


def greedy_variants(problem: Problem, starts: Iterable[Schedule]) -> Iterator[Schedule | None]:
    """Yield the results of searches that give the fullest stages more weight, or that begin with one of `starts`.

    None stands for a search without a result, because each takes time.
    """
    for emphasis in EMPHASES:
        yield GreedySearch(problem, emphasis=emphasis).run().schedule
    for start in starts:
        yield GreedySearch(problem, start=start).run().schedule


def smallest_budget(problem: Problem) -> int:
    """Return the least bytes, to within 0.1 %, for which paging alone finds a schedule."""

    def found(ram_bytes: int) -> Greedy:
        return GreedySearch(
            replace(problem, ram_bytes=ram_bytes, deadline_s=None), recompute=False, packing=False
        ).run()

    low = max((s.fixed_bytes for s in problem.stages), default=0)
    high = sum(t.nbytes for t in problem.tensors) + max(s.fixed_bytes + s.workspace_bytes for s in problem.stages)
    if (
        low < (needed := found(low).needed_bytes) < high
    ):  # what it comes down to where nothing is enough is mostly the least
        low, high = (low, needed) if found(needed).schedule is not None else (needed, high)
        if high == needed and found(slightly_less := needed - _near(needed)).schedule is None:
            low = slightly_less
    while high - low > _near(high):
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle).schedule is not None else (middle, high)
    return high


def _near(nbytes: int) -> int:
    return max(nbytes // 1000, 1)
