"""The decisions about each idle gap, and where tensors are as a result."""

import contextlib
from collections.abc import Iterator

from port_planner.problem.problem import Choice, GapDecision, Paging, Problem, Semantics
from port_planner.problem.replay import page_out_ready, read_window, write_window
from port_planner.search.greedy.load import step_slices


class Decisions:
    """The choices made so far, by gap; gaps without one are kept."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.choices: dict[int, Choice] = {}
        self.spans = [step_slices(gap.after + 1, gap.before, problem.size) for gap in problem.gaps]
        """Gap -> stages in which its tensor is idle."""
        self.ready = [page_out_ready(problem, gap, None) for gap in problem.gaps]
        """Gap -> the earliest stage at which its tensor can be restored from a page."""

    @contextlib.contextmanager
    def supposing(self, choice: Choice) -> Iterator[None]:
        """Treat an undecided gap as decided within the block."""
        self.choices[choice.gap] = choice
        try:
            yield
        finally:
            del self.choices[choice.gap]

    def unrolled(self, g: int, stage: int) -> int:
        """Return a stage of the step on the time line of a gap, which may extend past the step's end."""
        return stage if stage > self.problem.gaps[g].after else stage + self.problem.size

    def resident(self, tensor: int, version: int, stage: int) -> bool:
        """Return whether `version` of `tensor` is resident when `stage` starts."""
        g = self.problem.gap_at(tensor, stage)
        if g is None:
            found = self.problem.found_versions[tensor].get(stage)
            return found == version and stage != self.problem.tensors[tensor].birth
        gap = self.problem.gaps[g]
        if gap.version != version or gap.dead:
            return False
        choice = self.choices.get(g)
        return choice is None or self.unrolled(g, stage) >= choice.stage

    def freed(self, choice: Choice) -> list[slice]:
        """Return the stages in which the gap's tensor is not resident, not counting transfer buffers."""
        return step_slices(self.problem.gaps[choice.gap].after + 1, choice.stage, self.problem.size)

    def packed_bytes(self, choice: Choice) -> int:
        """Return the bytes of a packed form at the ends of its gap; 0 for a tensor that is not packed."""
        gap = self.problem.gaps[choice.gap]
        packs = choice.decision in (GapDecision.PACK, GapDecision.PACK_PAGE)
        packing = self.problem.tensors[gap.tensor].packing(gap.version) if packs else None
        return 0 if packing is None else packing.packed_bytes

    def packed_stages(self, choice: Choice) -> set[int]:
        """Return the stages in which a packed form takes memory; none for a tensor that is not packed."""
        if choice.decision not in (GapDecision.PACK, GapDecision.PACK_PAGE):
            return set()
        waits = self.freed(choice) if choice.decision is GapDecision.PACK else []
        ends = {self.problem.gaps[choice.gap].after, choice.stage % self.problem.size}
        return ends.union(self.buffers(choice), *(range(part.start, part.stop) for part in waits))

    def held_bytes(self, choice: Choice) -> int:
        """Return the bytes that a packed tensor holds through its gap; 0 for other decisions."""
        return self.packed_bytes(choice) if choice.decision is GapDecision.PACK else 0

    def paged_bytes(self, choice: Choice) -> int:
        """Return the bytes of a page: of the tensor, or of its packed form."""
        if choice.decision is GapDecision.PACK_PAGE:
            return self.packed_bytes(choice)
        return self.problem.tensors[self.problem.gaps[choice.gap].tensor].nbytes

    def buffers(self, choice: Choice) -> list[int]:
        """Return the stages in which a paged tensor still occupies RAM: while it is written or read back."""
        problem, gap = self.problem, self.problem.gaps[choice.gap]
        if choice.decision not in (GapDecision.PAGE, GapDecision.PACK_PAGE):
            return []
        late = [(gap.after + 1) % problem.size] if self.ready[choice.gap] > gap.after + 2 else []
        if problem.semantics is not Semantics.REAL:
            return late
        paging = self.paging_of(choice)
        reads = read_window(problem, gap, choice.stage, paging.seconds_in)
        return [s for s, _ in (*reads, *write_window(problem, gap, paging.seconds_out))]

    def paging_of(self, choice: Choice) -> Paging:
        """Return the cost of a choice to page."""
        gap = self.problem.gaps[choice.gap]
        tensor = self.problem.tensors[gap.tensor]
        packing = tensor.packing(gap.version) if choice.decision is GapDecision.PACK_PAGE else None
        return next(p for p in (tensor if packing is None else packing).paging if p.target == choice.target)

    def writes_first(self, g: int) -> bool:
        """Return whether paging this gap must write, for a target where contents are written once.

        It need not write if another paged gap has the same contents there.
        """
        gap = self.problem.gaps[g]
        tensor = self.problem.tensors[gap.tensor]
        if tensor.persistent and not tensor.writes:
            return False
        contents = tensor.contents(gap.version)
        return not any(
            h in self.choices
            and self.choices[h].decision is GapDecision.PAGE
            and not self.problem.rewritten(gap.tensor, self.choices[h].target)
            and tensor.contents(self.problem.gaps[h].version) == contents
            for h in self.problem.gaps_of[gap.tensor]
            if h != g
        )

    def clashes(self, g: int, decision: GapDecision, *, before: bool) -> bool:
        """Return whether the neighbouring gap has `decision`; POET cannot page out in the stage
        that rematerializes a tensor.
        """
        if self.problem.semantics is not Semantics.POET:
            return False
        gap = self.problem.gaps[g]
        for h in self.problem.gaps_of[gap.tensor]:
            other = self.problem.gaps[h]
            near = other.before == gap.after if before else other.after == gap.before
            choice = self.choices.get(h)
            if near and choice is not None and choice.decision is decision:
                return not before or choice.stage == other.before
        return False
