"""A valid schedule in a fraction of a second, without a solver: relieve the fullest stages at the least energy.

While memory is short anywhere, the gap that costs the least joules per byte-stage of missing memory is bridged by
paging or rematerializing; afterwards decisions that turned out to be unnecessary or dear are taken back. Rematerializations carry
their intermediates with them, so that every intermediate state is a consistent schedule.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from planner.problem.model import Choice, Fate, Problem, Schedule, Semantics
from planner.problem.replay import page_out_ready, read_window, transfers_fit, write_window

Bytes = npt.NDArray[np.float64]
MAX_CHAIN = 24
"""A rematerialization that needs more intermediates than this is left to the solver."""

EMPHASES = (0.5, 1.0, 4.0)

LARGE_STAGES, LARGE_TOLERANCE = 1500, 0.05
"""Beyond this many stages a move is made if it is within this share of the cheapest: equal blocks tie all the time."""


@dataclass(slots=True)
class Greedy:
    """What the greedy search found. `schedule` is None if even paging everything does not fit.

    `needed_bytes`: the least budget for which this search finds a schedule; `stage`: where that much is needed.
    """

    schedule: Schedule | None
    needed_bytes: int
    stage: int


@dataclass(slots=True)
class Move:
    """One way to bridge a gap: its cost and what it changes."""

    gap: int
    choice: Choice
    joules: float
    seconds: float
    io_seconds: float
    closures: dict[int, dict[int, int]] = field(default_factory=dict)
    """Stage -> intermediates (tensor -> version) that its rematerializations need once this move is made."""


class GreedySearch:
    """The state of one search: load per stage, decisions so far, rematerializations and intermediates per stage."""

    def __init__(
        self,
        problem: Problem,
        *,
        paging: bool = True,
        recompute: bool = True,
        start: Schedule | None = None,
        emphasis: float = 0.0,
    ) -> None:
        """`start`: decisions to begin with. `emphasis`: how much more relief counts where memory is shortest."""
        self.problem, self.emphasis = problem, emphasis
        self.tolerance = LARGE_TOLERANCE if problem.size > LARGE_STAGES else 1e-9
        self.chain_limit = MAX_CHAIN
        self.paging, self.recompute = paging, recompute
        self.limit = float(problem.ram_bytes if problem.ram_bytes is not None else 1 << 62)
        size = problem.size
        self.after = np.array([float(s.fixed_bytes + s.workspace_bytes) for s in problem.stages])
        self.before = np.array([float(s.fixed_bytes) for s in problem.stages])
        self.choices: dict[int, Choice] = {}
        self.moves: dict[int, Move] = {}
        self.roots: dict[int, dict[int, int]] = defaultdict(dict)
        """Stage -> tensors that come back there by a rematerialization, with their versions."""
        self.intermediates: dict[int, dict[int, int]] = defaultdict(dict)
        self.reads: dict[int, set[int]] = defaultdict(set)
        """Stage -> tensors that its rematerializations read while they are resident."""
        self.read_at: dict[int, set[int]] = defaultdict(set)
        self.sliced: set[int] = set()
        self.io_seconds = self.extra_seconds = self.written = 0.0
        self.most = 1.0
        self.slack = (
            np.inf if problem.deadline_s is None else max(problem.deadline_s - problem.base_seconds, 0.0) + 1e-12
        )
        self.gap_of: list[dict[int, int]] = [{} for _ in problem.tensors]
        self.spans: list[list[slice]] = []
        self._load_accesses(size)
        if start is not None:
            self._adopt(start)

    def _adopt(self, start: Schedule) -> None:
        """Begin with the decisions of `start` instead of keeping everything; what they need is looked up again."""
        problem, self.chain_limit = self.problem, max(MAX_CHAIN, len(start.intermediates))
        for choice in start.choices:
            gap = problem.gaps[choice.gap]
            tensor = problem.tensors[gap.tensor]
            if choice.fate is Fate.PAGE:
                paging = next(p for p in tensor.paging if p.target == choice.target)
                first = self._first_write(choice.gap)
                io = paging.seconds_in + (paging.seconds_out if first else 0.0)
                joules = paging.joules_in + (paging.joules_out if first else 0.0)
                self._commit(Move(choice.gap, choice, joules, 0.0, io))
            elif (
                choice.fate is Fate.RECOMPUTE
                and (rematerialization := tensor.rematerializations[gap.version]) is not None
            ):
                self._commit(Move(choice.gap, choice, rematerialization.joules, rematerialization.seconds, 0.0))
        for stage in list(self.roots):
            self._refresh(stage)
            self.extra_seconds += self._closure_cost(self.intermediates[stage])[1]

    def _load_accesses(self, size: int) -> None:
        problem = self.problem
        for tensor in problem.tensors:
            where = list(tensor.accesses)
            self.after[where] += tensor.nbytes
            self.before[where] += tensor.nbytes
            if tensor.birth >= 0:
                self.before[tensor.birth] -= tensor.nbytes
        for g, gap in enumerate(problem.gaps):
            self.spans.append(_span(gap.after + 1, gap.before, size))
            for part in self.spans[g]:
                if not gap.dead:
                    self._hold(part, problem.tensors[gap.tensor].nbytes)
            lookup = self.gap_of[gap.tensor]
            for part in self.spans[g]:
                lookup.update(dict.fromkeys(range(part.start, part.stop), g))

    def _hold(self, part: slice, nbytes: float) -> None:
        self.after[part] += nbytes
        self.before[part] += nbytes

    # -- what a rematerialization needs

    def _resident(self, tensor: int, version: int, stage: int) -> bool:
        """Say whether `version` of `tensor` is there when `stage` starts, under the present decisions."""
        info = self.problem.tensors[tensor]
        g = self.gap_of[tensor].get(stage)
        if g is None:
            return stage != info.birth and stage in info.accesses and info.version_before(stage) == version
        gap = self.problem.gaps[g]
        if gap.version != version or gap.dead:
            return False
        choice = self.choices.get(g)
        return choice is None or self._unrolled(g, stage) >= choice.stage

    def _unrolled(self, g: int, stage: int) -> int:
        return stage if stage > self.problem.gaps[g].after else stage + self.problem.size

    def _closure(self, stage: int, roots: dict[int, int]) -> tuple[dict[int, int], set[int]] | None:
        """Return the intermediates that rematerializing `roots` before `stage` needs and the residents it reads."""
        tensors = self.problem.tensors
        found: dict[int, int] = {}
        reads: set[int] = set()
        stack = list(roots.items())
        while stack:
            i, version = stack.pop()
            rematerializations = tensors[i].rematerializations
            rematerialization = rematerializations[version] if 0 <= version < len(rematerializations) else None
            if rematerialization is None:
                return None
            for u, v in rematerialization.inputs:
                if u in roots or u in found:
                    if roots.get(u, found.get(u)) != v:
                        return None
                elif self._resident(u, v, stage):
                    reads.add(u)
                else:
                    g = self.gap_of[u].get(stage)
                    if g is None or self.problem.gaps[g].version != v or len(found) >= self.chain_limit:
                        return None
                    found[u] = v
                    stack.append((u, v))
        return found, reads

    def _closure_cost(self, closure: dict[int, int]) -> tuple[float, float, float]:
        """Return joules, seconds and bytes of a set of intermediates."""
        joules = seconds = nbytes = 0.0
        for i, v in closure.items():
            rematerialization = self.problem.tensors[i].rematerializations[v]
            if rematerialization is not None:
                joules += rematerialization.joules
                seconds += rematerialization.seconds
                nbytes += self.problem.tensors[i].nbytes
        return joules, seconds, nbytes

    # -- moves

    def _options(self, g: int) -> list[Move]:
        gap = self.problem.gaps[g]
        tensor = self.problem.tensors[gap.tensor]
        affected = sorted(self._unrolled(g, s) for s in self.read_at[gap.tensor] if self.gap_of[gap.tensor].get(s) == g)
        moves = []
        rematerialization = (
            tensor.rematerializations[gap.version] if 0 <= gap.version < len(tensor.rematerializations) else None
        )
        if self.recompute and rematerialization is not None and gap.before <= self.problem.size:
            stages = [gap.before] if not affected or affected[0] == gap.before else [gap.before, affected[0]]
            moves += [m for s in stages if (m := self._rematerialization_move(g, s, affected))]
        if self.paging:
            for target in range(len(tensor.paging)):
                stages = [gap.before] if not affected or affected[0] == gap.before else [gap.before, affected[0]]
                moves += [m for s in stages if (m := self._page_move(g, s, target, affected))]
        return moves

    def _with_absence(self, g: int, stage: int, affected: list[int]) -> dict[int, dict[int, int]] | None:
        """Return new closures of the stages whose rematerializations read the gap's tensor while it will be gone."""
        gap = self.problem.gaps[g]
        closures = {}
        self.choices[g] = Choice(g, stage, Fate.RECOMPUTE)
        for s in affected:
            if s < stage:
                found = self._closure(s % self.problem.size, self.roots[s % self.problem.size])
                if found is None or gap.tensor not in found[0]:
                    del self.choices[g]
                    return None
                closures[s % self.problem.size] = found[0]
        del self.choices[g]
        return closures

    def _rematerialization_move(self, g: int, stage: int, affected: list[int]) -> Move | None:
        gap = self.problem.gaps[g]
        if stage == gap.before and self._clashes(g, Fate.PAGE, before=False):
            return None
        closures = self._with_absence(g, stage, affected)
        if closures is None:
            return None
        at = stage % self.problem.size
        self.choices[g] = Choice(g, stage, Fate.RECOMPUTE)
        found = self._closure(at, {**self.roots[at], gap.tensor: gap.version})
        choice = self.choices.pop(g)
        if found is None:
            return None
        closures[at] = found[0]
        rematerialization = self.problem.tensors[gap.tensor].rematerializations[gap.version]
        if rematerialization is None:
            return None
        joules, seconds = rematerialization.joules, rematerialization.seconds
        for s, closure in closures.items():
            new, old = self._closure_cost(closure), self._closure_cost(self.intermediates[s])
            joules += new[0] - old[0]
            seconds += new[1] - old[1]
            peak = self.before[s] + new[2] - old[2] + rematerialization.workspace_bytes
            if peak > max(self.limit, self.before[s], self.after[s]):
                return None
        if self.extra_seconds + seconds > self.slack:
            return None
        return Move(g, choice, joules, seconds, 0.0, closures)

    def _page_move(self, g: int, stage: int, target: int, affected: list[int]) -> Move | None:
        problem, gap = self.problem, self.problem.gaps[g]
        tensor = problem.tensors[gap.tensor]
        paging = tensor.paging[target]
        if self._clashes(g, Fate.RECOMPUTE, before=True):
            return None
        if stage < page_out_ready(problem, gap, None) or not transfers_fit(problem, gap, paging, stage):
            return None
        closures = self._with_absence(g, stage, affected)
        if closures is None:
            return None
        first = self._first_write(g)
        joules = paging.joules_in + (paging.joules_out if first else 0.0)
        io = paging.seconds_in + (paging.seconds_out if first else 0.0)
        if first and problem.write_limit_bytes is not None and self.written + tensor.nbytes > problem.write_limit_bytes:
            return None
        seconds = 0.0
        for s, closure in closures.items():
            new, old = self._closure_cost(closure), self._closure_cost(self.intermediates[s])
            joules += new[0] - old[0]
            seconds += new[1] - old[1]
            if self.before[s] + new[2] - old[2] > max(self.limit, self.before[s], self.after[s]):
                return None
        if problem.semantics is not Semantics.POET:
            stall = max(self.io_seconds + io - problem.base_seconds, 0.0) - max(
                self.io_seconds - problem.base_seconds, 0.0
            )
            if self.extra_seconds + seconds + max(self.io_seconds + io - problem.base_seconds, 0.0) > self.slack:
                return None
            joules += problem.static_watts * stall
        elif self.extra_seconds + seconds > self.slack:
            return None
        return Move(g, Choice(g, stage, Fate.PAGE, paging.target), joules, seconds, io, closures)

    def _clashes(self, g: int, fate: Fate, *, before: bool) -> bool:
        """Say whether the neighbouring gap has `fate`: POET cannot page out in the stage that rematerializes a tensor."""
        if self.problem.semantics is not Semantics.POET:
            return False
        gap = self.problem.gaps[g]
        for h in self.problem.gaps_of[gap.tensor]:
            other = self.problem.gaps[h]
            near = other.before == gap.after if before else other.after == gap.before
            choice = self.choices.get(h)
            if near and choice is not None and choice.fate is fate:
                return not before or choice.stage == other.before
        return False

    def _first_write(self, g: int) -> bool:
        """Say whether paging this gap must write: no other paged gap holds the same contents."""
        gap = self.problem.gaps[g]
        tensor = self.problem.tensors[gap.tensor]
        if tensor.persistent and not tensor.writes:
            return False
        contents = tensor.contents(gap.version)
        return not any(
            h in self.choices
            and self.choices[h].fate is Fate.PAGE
            and tensor.contents(self.problem.gaps[h].version) == contents
            for h in self.problem.gaps_of[gap.tensor]
            if h != g
        )

    def _relief(self, g: int, choice: Choice, over: Bytes) -> float:
        gap = self.problem.gaps[g]
        nbytes = self.problem.tensors[gap.tensor].nbytes
        relief = sum(self._weight(over[p], nbytes) for p in self._freed(g, choice))
        buffers = self._buffers(g, choice)
        return relief - self._weight(over[buffers], nbytes) if buffers else relief

    def _weight(self, over: Bytes, nbytes: int) -> float:
        covered = np.minimum(over, nbytes)
        if self.emphasis:
            covered = covered * (over / self.most) ** self.emphasis
        return float(covered.sum())

    def _freed(self, g: int, choice: Choice) -> list[slice]:
        """Return the stages in which the gap's tensor is gone, transfer buffers aside."""
        return _span(self.problem.gaps[g].after + 1, choice.stage, self.problem.size)

    def _buffers(self, g: int, choice: Choice) -> list[int]:
        """Return the stages in which a paged tensor still occupies RAM: being written, or landing."""
        problem, gap = self.problem, self.problem.gaps[g]
        if choice.fate is not Fate.PAGE:
            return []
        late = [(gap.after + 1) % problem.size] if page_out_ready(problem, gap, None) > gap.after + 2 else []
        if problem.semantics is not Semantics.REAL:
            return late
        paging = next(p for p in problem.tensors[gap.tensor].paging if p.target == choice.target)
        reads = read_window(problem, gap, choice.stage, paging.seconds_in)
        return [s for s, _ in (*reads, *write_window(problem, gap, paging.seconds_out))]

    def _commit(self, move: Move) -> None:
        g, gap = move.gap, self.problem.gaps[move.gap]
        tensor = self.problem.tensors[gap.tensor]
        if move.choice.fate is Fate.PAGE and self._first_write(g):
            self.written += tensor.nbytes
        self.choices[g], self.moves[g] = move.choice, move
        self._free(g, move.choice, float(tensor.nbytes))
        if move.choice.fate is Fate.RECOMPUTE:
            self.roots[move.choice.stage % self.problem.size][gap.tensor] = gap.version
        for s in move.closures:
            self._refresh(s)
        self.extra_seconds += move.seconds
        self.io_seconds += move.io_seconds

    def _free(self, g: int, choice: Choice, nbytes: float) -> None:
        for part in self._freed(g, choice):
            self._hold(part, -nbytes)
        for s in self._buffers(g, choice):
            self._hold(slice(s, s + 1), nbytes)

    def _refresh(self, stage: int) -> None:
        """Recompute the intermediates of a stage after its roots or the residents changed."""
        found = self._closure(stage, self.roots[stage]) if self.roots[stage] else ({}, set())
        if found is None:
            found = (self.intermediates[stage], self.reads[stage])
        for u in self.reads[stage] - found[1]:
            self.read_at[u].discard(stage)
        for u in found[1]:
            self.read_at[u].add(stage)
        old, new = self._closure_cost(self.intermediates[stage])[2], self._closure_cost(found[0])[2]
        self.before[stage] += new - old
        self.intermediates[stage], self.reads[stage] = found

    # -- the search

    def run(self) -> Greedy:
        """Return the schedule found, or how much memory the step would need."""
        feasible = self._relieve()
        if not feasible and self.paging:
            self._use_slices()
            feasible = self._relieve()
        load = np.maximum(self.after, self.before)
        stage = int(np.argmax(load))
        if not feasible:
            return Greedy(None, round(float(load[stage])), stage)
        self._take_back()
        return Greedy(self.schedule(), round(float(load[stage])), stage)

    def _over(self) -> Bytes:
        over: Bytes = np.maximum(np.maximum(self.after, self.before) - self.limit, 0.0)
        self.most = float(over.max()) or 1.0
        return over

    def _relieve(self) -> bool:
        """Make moves until nothing exceeds the limit; False if no move is left that helps."""
        over = self._over()
        heap: list[tuple[float, int]] = []
        for g, gap in enumerate(self.problem.gaps):
            movable = not gap.dead and g not in self.choices and not self.problem.tensors[gap.tensor].pinned
            if movable and any(over[part].any() for part in self.spans[g]):
                heap.append((0.0, g))
        heapq.heapify(heap)
        while heap and over.any():
            key, g = heapq.heappop(heap)
            best = self._best_move(g, over)
            if best is None:
                continue
            if heap and best[0] > heap[0][0] * (1 + self.tolerance) and best[0] > key:
                heapq.heappush(heap, (best[0], g))
                continue
            self._commit(best[1])
            over = self._over()
        return not over.any()

    def _best_move(self, g: int, over: Bytes) -> tuple[float, Move] | None:
        if not any(over[part].any() for part in self.spans[g]):
            return None
        best: tuple[float, Move] | None = None
        for move in self._options(g):
            relief = self._relief(g, move.choice, over)
            price = max(self.price(move), 0.0)
            if relief > 0 and (best is None or price / relief < best[0]):
                best = (price / relief, move)
        return best

    def price(self, move: Move) -> float:
        """Return what a move costs: joules."""
        return move.joules

    def _use_slices(self) -> None:
        """Slice the updates at stages that stay too full, their members paged in before and out after."""
        over = self._over()
        for k, slicing in enumerate(self.problem.slicings):
            if not over[slicing.stage]:
                continue
            ready = all(self._paged_around(i, slicing.stage) for i in slicing.members)
            if not ready:
                continue
            self.sliced.add(k)
            saved = slicing.saved_bytes + sum(self.problem.tensors[i].nbytes for i in slicing.members)
            self.after[slicing.stage] -= saved - slicing.buffer_bytes
            self.before[slicing.stage] -= sum(self.problem.tensors[i].nbytes for i in slicing.members)

    def _paged_around(self, tensor: int, stage: int) -> bool:
        """Page the gaps on both sides of `stage`; False if a neighbouring use or a rematerialization forbids it."""
        sides = []
        for g in self.problem.gaps_of[tensor]:
            gap = self.problem.gaps[g]
            if stage in (gap.after, gap.before % self.problem.size):
                sides.append(g)
        tensor_gaps = self.problem.tensors[tensor].accesses
        needed = 1 if len(tensor_gaps) == 1 else 2
        if len(sides) < needed:
            return False
        for g in sides:
            choice = self.choices.get(g)
            if choice is None:
                move = next(
                    (m for m in self._options(g) if m.choice.fate is Fate.PAGE and m.choice.stage == self._end(g)), None
                )
                if move is None:
                    return False
                self._commit(move)
            elif choice.fate is not Fate.PAGE or choice.stage != self._end(g):
                return False
        return True

    def _end(self, g: int) -> int:
        return self.problem.gaps[g].before

    def _take_back(self) -> None:
        """Undo decisions, the dearest first, where there is room after all."""
        locked = {g for k in self.sliced for i in self.problem.slicings[k].members for g in self.problem.gaps_of[i]}
        for g in sorted(self.choices, key=lambda g: -self.moves[g].joules):
            if g in locked or self.moves[g].joules <= 0:
                continue
            gap, choice = self.problem.gaps[g], self.choices[g]
            nbytes = self.problem.tensors[gap.tensor].nbytes
            load = np.maximum(self.after, self.before)
            load[self._buffers(g, choice)] -= nbytes
            if all((load[p] + nbytes <= self.limit).all() for p in self._freed(g, choice)):
                self._undo(g, nbytes)

    def _undo(self, g: int, nbytes: int) -> None:
        gap, choice, move = self.problem.gaps[g], self.choices.pop(g), self.moves[g]
        if choice.fate is Fate.PAGE and self._first_write(g):
            self.written -= nbytes
        self._free(g, choice, -float(nbytes))
        touched = {
            s for s in self.intermediates if gap.tensor in self.intermediates[s] and self.gap_of[gap.tensor].get(s) == g
        }
        if choice.fate is Fate.RECOMPUTE:
            at = choice.stage % self.problem.size
            del self.roots[at][gap.tensor]
            touched.add(at)
        for s in touched:
            self._refresh(s)
        self.io_seconds -= move.io_seconds
        self.extra_seconds -= move.seconds

    def schedule(self) -> Schedule:
        """Return the present decisions."""
        intermediates = tuple(sorted((i, s) for s, found in self.intermediates.items() for i in found))
        return Schedule(tuple(self.choices[g] for g in sorted(self.choices)), intermediates, tuple(sorted(self.sliced)))


def _span(start: int, stop: int, size: int) -> list[slice]:
    """Return the stages start..stop-1, which may run past the step's end, as slices."""
    if stop <= size:
        return [slice(start, stop)] if start < stop else []
    return [p for p in (slice(start, size), slice(0, stop - size)) if p.start < p.stop]


def greedy(problem: Problem, *, paging: bool = True, recompute: bool = True) -> Greedy:
    """Return a schedule of `problem` within its budgets, found without a solver.

    Rematerializations can lead into a dead end, where their inputs hold what they were to free; paging alone cannot, so it is
    tried next if both are allowed.
    """
    found = GreedySearch(problem, paging=paging, recompute=recompute).run()
    if found.schedule is None and paging and recompute:
        second = GreedySearch(problem, paging=True, recompute=False).run()
        return second if second.schedule is not None or second.needed_bytes < found.needed_bytes else found
    return found


def greedy_variants(problem: Problem, starts: Iterable[Schedule]) -> Iterator[Schedule]:
    """Yield what the search finds when it weighs the fullest stages more, and when it begins with each of `starts`."""
    for emphasis in EMPHASES:
        found = GreedySearch(problem, emphasis=emphasis).run().schedule
        if found is not None:
            yield found
    for start in starts:
        found = GreedySearch(problem, start=start).run().schedule
        if found is not None:
            yield found


def smallest_budget(problem: Problem) -> int:
    """Return the least bytes for which paging alone finds a schedule, to within 0.1 %."""
    low = max((s.fixed_bytes for s in problem.stages), default=0)
    high = sum(t.nbytes for t in problem.tensors) + max(s.fixed_bytes + s.workspace_bytes for s in problem.stages)
    while high - low > max(high // 1000, 1):
        middle = (low + high) // 2
        found = GreedySearch(replace(problem, ram_bytes=middle, deadline_s=None), recompute=False).run()
        low, high = (low, middle) if found.schedule is not None else (middle, high)
    return high
