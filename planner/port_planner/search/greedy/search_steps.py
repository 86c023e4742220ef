"""The ways to bridge one idle gap that memory, deadline and the other decisions allow."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from port_planner.problem.problem import Choice, GapDecision, Paging, Problem, Semantics
from port_planner.problem.replay import transfers_fit
from port_planner.search.greedy.closures import Closures, Versions
from port_planner.search.greedy.decisions import Decisions
from port_planner.search.greedy.load import PageLimits, StageLoad


@dataclass(slots=True)
class SearchStep:
    """One way to bridge a gap: its cost, and its changes."""

    choice: Choice
    joules: float
    seconds: float
    io_seconds: float
    closures: Mapping[int, Versions] = field(default_factory=dict)
    """Stage -> intermediates that its rematerializations need once this search step is made."""


@dataclass(slots=True)
class Additions:
    """What the search steps made so far add to the step; transfers run in parallel with its compute."""

    seconds: float = 0.0
    io_seconds: float = 0.0
    written_bytes: float = 0.0


class SearchSteps:
    """Finds the search steps that are possible under the current decisions."""

    def __init__(
        self, problem: Problem, decisions: Decisions, closures: Closures, load: StageLoad, added: Additions
    ) -> None:
        self.problem, self.decisions, self.closures, self.load, self.added = problem, decisions, closures, load, added
        self.limit_bytes = PageLimits(problem)
        self._headroom_s = (
            math.inf if problem.deadline_s is None else max(problem.deadline_s - problem.base_seconds, 0.0) + 1e-12
        )

    def of(self, g: int, *, paging: bool, recompute: bool, packing: bool = True) -> Iterator[SearchStep]:
        """Yield the search steps for a gap: its tensor is restored when it is used next, or when a
        rematerialization reads it.
        """
        gap = self.problem.gaps[g]
        tensor = self.problem.tensors[gap.tensor]
        readers = self.closures.readers(g)
        stages = [gap.before] if not readers or readers[0] == gap.before else [gap.before, readers[0]]
        rematerialization = tensor.rematerialization(gap.version)
        if recompute and rematerialization is not None and gap.before <= self.problem.size:
            for stage in stages:
                if (step := self._rematerialize(g, stage, readers)) is not None:
                    yield step
        if paging:
            for target in tensor.paging:
                for stage in stages:
                    if (step := self._page(g, stage, target, readers)) is not None:
                        yield step
        if packing and (step := self._pack(g, readers)) is not None:
            yield step
            if paging:
                yield from self._pack_and_page(g, step)

    def page_cost(self, g: int, paging: Paging) -> tuple[float, float]:
        """Return joules and transfer seconds of paging a gap; contents that are already there are not written again."""
        rewritten = self.problem.rewritten(self.problem.gaps[g].tensor, paging.target)
        if rewritten or self.decisions.writes_first(g):
            return paging.joules_in + paging.joules_out, paging.seconds_in + paging.seconds_out
        return paging.joules_in, paging.seconds_in

    def exposed_s(self, more_io_seconds: float) -> float:
        """Return the transfer seconds that the step's own compute does not hide, with this many more."""
        return max(self.added.io_seconds + more_io_seconds - self.problem.base_seconds, 0.0)

    def _rematerialize(self, g: int, stage: int, readers: list[int]) -> SearchStep | None:
        gap = self.problem.gaps[g]
        rematerialization = self.problem.tensors[gap.tensor].rematerialization(gap.version)
        if rematerialization is None or (
            stage == gap.before and self.decisions.clashes(g, GapDecision.PAGE, before=False)
        ):
            return None
        closures = self.closures.without(g, stage, readers)
        if closures is None:
            return None
        at = stage % self.problem.size
        choice = Choice(g, stage, GapDecision.RECOMPUTE)
        with self.decisions.supposing(choice):
            found = self.closures.find(at, {**self.closures.roots[at], gap.tensor: gap.version})
        if found is None:
            return None
        closures[at] = found[0]
        joules, seconds = rematerialization.joules, rematerialization.seconds
        for s, closure in closures.items():
            change = self.closures.change(s, closure)
            joules += change.joules
            seconds += change.seconds
            if not self.load.allows(s, change.nbytes + rematerialization.workspace_bytes):
                return None
        if self.added.seconds + seconds > self._headroom_s:
            return None
        return SearchStep(choice, joules, seconds, 0.0, closures)

    def _page(self, g: int, stage: int, paging: Paging, readers: list[int]) -> SearchStep | None:
        problem, gap = self.problem, self.problem.gaps[g]
        if self.decisions.clashes(g, GapDecision.RECOMPUTE, before=True):
            return None
        if stage < self.decisions.ready[g] or not transfers_fit(problem, gap, paging, stage):
            return None
        closures = self.closures.without(g, stage, readers)
        choice = Choice(g, stage, GapDecision.PAGE, paging.target)
        if closures is None or not self._may_be_written(g, paging.target) or not self.limit_bytes.fits(choice):
            return None
        joules, io_seconds = self.page_cost(g, paging)
        seconds = 0.0
        for s, closure in closures.items():
            change = self.closures.change(s, closure)
            joules += change.joules
            seconds += change.seconds
            if not self.load.allows(s, change.nbytes):
                return None
        waited_s = 0.0
        if problem.semantics is not Semantics.POET:
            waited_s = self.exposed_s(io_seconds)
            joules += problem.static_watts * (waited_s - self.exposed_s(0.0))
        if self.added.seconds + seconds + waited_s > self._headroom_s:
            return None
        return SearchStep(choice, joules, seconds, io_seconds, closures)

    def _pack(self, g: int, readers: list[int]) -> SearchStep | None:
        gap = self.problem.gaps[g]
        packing = self.problem.tensors[gap.tensor].packing(gap.version)
        closures = None if packing is None else self.closures.without(g, gap.before, readers)
        if packing is None or closures is None:
            return None
        joules, seconds = packing.joules, packing.seconds
        for s, closure in closures.items():
            change = self.closures.change(s, closure)
            joules += change.joules
            seconds += change.seconds
            if not self.load.allows(s, change.nbytes):
                return None
        if self.added.seconds + seconds > self._headroom_s:
            return None
        return SearchStep(Choice(g, gap.before, GapDecision.PACK), joules, seconds, 0.0, closures)

    def _pack_and_page(self, g: int, packed: SearchStep) -> Iterator[SearchStep]:
        """Yield the variants of a packing that page the packed form to each medium."""
        problem, gap = self.problem, self.problem.gaps[g]
        packing, limit = problem.tensors[gap.tensor].packing(gap.version), problem.write_limit_bytes
        if packing is None or gap.before < self.decisions.ready[g]:
            return
        if limit is not None and self.added.written_bytes + packing.packed_bytes > limit:
            return
        if self.decisions.clashes(g, GapDecision.RECOMPUTE, before=True):
            return
        for paging in packing.paging:
            if not transfers_fit(problem, gap, paging, gap.before):
                continue
            joules, waited_s = packed.joules + paging.joules_in + paging.joules_out, 0.0
            io_seconds = paging.seconds_in + paging.seconds_out
            if problem.semantics is not Semantics.POET:
                waited_s = self.exposed_s(io_seconds)
                joules += problem.static_watts * (waited_s - self.exposed_s(0.0))
            if self.added.seconds + packed.seconds + waited_s <= self._headroom_s:
                choice = Choice(g, gap.before, GapDecision.PACK_PAGE, paging.target)
                yield SearchStep(choice, joules, packed.seconds, io_seconds, packed.closures)

    def _may_be_written(self, g: int, target: int) -> bool:
        """Return whether the limit of flash writes leaves space for the gap's tensor, or
        whether it need not be written.
        """
        limit, nbytes = self.problem.write_limit_bytes, self.problem.tensors[self.problem.gaps[g].tensor].nbytes
        if limit is None or self.problem.limit_bytes(target) is not None:
            return True
        return not self.decisions.writes_first(g) or self.added.written_bytes + nbytes <= limit
