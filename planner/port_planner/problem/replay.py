"""Replay a schedule of an abstract problem and measure it.

It is written independently of the solver, so that it can judge one.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from port_planner.problem.problem import Choice, Gap, GapDecision, Packing, Paging, Problem, Schedule, Semantics

Bytes = npt.NDArray[np.float64]

MAX_PREFETCH_STAGES = 12
"""Largest number of stages by which a read starts before its tensor is needed; longer reads are
better counted as stalls.
"""


@dataclass(slots=True)
class ScheduleCost:
    """The cost of a schedule. `errors` is empty exactly if the schedule is valid and within its budgets."""

    joules: float = 0.0
    overhead_joules: float = 0.0
    static_joules: float = 0.0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    recompute_seconds: float = 0.0
    peak_bytes: int = 0
    peak_stage: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    load_bytes: Bytes = field(default_factory=lambda: np.zeros(0))
    errors: list[str] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        return not self.errors


def transfer_window(problem: Problem, stage: int, seconds: float, step: int) -> list[tuple[int, float]]:
    """Return (stage, seconds) shares of a transfer that ends before `stage` (step -1) or starts at it (step +1).

    A read fills the compute time of the stages before its use, nearest first; a write fills the stages after. The part
    that does not fit within MAX_PREFETCH_STAGES stalls the stage nearest to the use.
    """
    size, left = problem.size, seconds
    s = (stage - 1 if step < 0 else stage) % size
    shares: list[tuple[int, float]] = []
    for _ in range(min(MAX_PREFETCH_STAGES, size - 1)):
        part = min(left, problem.stages[s].seconds)
        shares.append((s, part))
        left -= part
        if left <= 1e-12 * seconds:
            break
        s = (s + step) % size
    if left > 0:
        first, part = shares[0]
        shares[0] = (first, part + left)
    return shares


def read_window(problem: Problem, gap: Gap, stage: int, seconds: float) -> list[tuple[int, float]]:
    """Return the shares of a page-in that must be complete when `stage` starts, within its gap."""
    return _inside(problem, gap, transfer_window(problem, stage, seconds, -1))


def write_window(problem: Problem, gap: Gap, seconds: float) -> list[tuple[int, float]]:
    """Return the shares of a page-out that starts right after the gap's first end."""
    return _inside(problem, gap, transfer_window(problem, gap.after + 1, seconds, 1))


def transfers_fit(problem: Problem, gap: Gap, paging: Paging, stage: int) -> bool:
    """Return whether a tensor can be written and read back by `stage`, with its buffer free in between."""
    if problem.semantics is not Semantics.REAL:
        return True
    reads = {s for s, _ in read_window(problem, gap, stage, paging.seconds_in)}
    return not reads & {s for s, _ in write_window(problem, gap, paging.seconds_out)}


def _inside(problem: Problem, gap: Gap, shares: list[tuple[int, float]]) -> list[tuple[int, float]]:
    idle = {s % problem.size for s in range(gap.after + 1, gap.before)}
    kept = [(s, part) for s, part in shares if s in idle]
    rest = sum(part for s, part in shares if s not in idle)
    if not kept:
        return [(shares[0][0], rest)]
    return [(kept[0][0], kept[0][1] + rest), *kept[1:]]


def replay(problem: Problem, schedule: Schedule) -> ScheduleCost:
    """Return the cost of `schedule` and every rule that it breaks: rematerialization inputs, memory, deadline, wear."""
    return _Replay(problem, schedule).run()


class _Replay:
    """One replay: residency per tensor and stage, then rematerializations stage by stage, then time and energy."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.schedule = problem, schedule
        self.result = ScheduleCost()
        count, size = len(problem.tensors), problem.size
        self.resident = np.zeros((count, size), dtype=bool)
        """Whether each tensor is resident at the start of a stage, once its rematerializations are done."""
        self.extra = np.zeros(size)
        """Bytes of landing buffers, unfinished writes, packed tensors and compressed pages."""
        self.rematerializations: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)
        """Stage -> (tensor, version, is intermediate)."""
        links = max(problem.links, default=0) + 1
        self.transfers = np.zeros((links, size))
        self.transfer_total = np.zeros(links)
        self.paged_bytes = {
            d: np.zeros(size) for d in range(len(problem.targets)) if problem.limit_bytes(d) is not None
        }
        """Target that is memory -> bytes that its pages take at each stage."""
        self.homes: dict[int, int] = {}
        """Persistent tensor -> the target to which it was paged first."""
        self.copies: set[tuple[int, int]] = set()
        """Persistent tensors with a copy in a target that is memory."""
        self.packing, self.unpacking = np.zeros(size), np.zeros(size)
        """Bytes of packed forms besides their tensors, after a stage and before it starts."""
        self.extra_seconds = 0.0
        self.extra_joules = 0.0
        self.seconds = np.array([stage.seconds for stage in problem.stages])
        self.work = np.array([stage.workspace_bytes for stage in problem.stages], dtype=float)
        self.fixed = np.array([stage.fixed_bytes for stage in problem.stages], dtype=float)
        """Fixed bytes of each stage, for its chosen alternative."""
        self.saved: dict[tuple[int, int], int] = {}
        """(tensor, stage) -> bytes that are not resident because the tensor comes in tiles."""

    def run(self) -> ScheduleCost:
        self._place_accesses()
        self._place_choices()
        self._place_intermediates()
        self._place_slices()
        self._place_variants()
        self._measure_memory()
        self._measure_time()
        self._verify_budgets()
        return self.result

    def _fail(self, message: str) -> None:
        self.result.errors.append(message)

    def _place_accesses(self) -> None:
        for i, tensor in enumerate(self.problem.tensors):
            self.resident[i, list(tensor.accesses)] = True

    def _place_choices(self) -> None:
        problem = self.problem
        chosen = {}
        for choice in self.schedule.choices:
            if choice.gap in chosen:
                self._fail(f"gap {choice.gap} is decided twice")
            chosen[choice.gap] = choice
        paged: dict[tuple[int, int, int], bool] = {}
        for g, gap in enumerate(problem.gaps):
            found = chosen.get(g)
            if (
                found is not None
                and not (gap.after < found.stage <= gap.before)
                and found.decision is not GapDecision.KEEP
            ):
                self._fail(f"gap {g} of tensor {gap.tensor} returns at stage {found.stage}, outside it")
            elif found is None or found.decision is GapDecision.KEEP:
                if not gap.dead:
                    self._reside(gap.tensor, gap.after + 1, gap.before)
            elif gap.dead:
                self._fail(f"gap {g} of tensor {gap.tensor} is dead; only intermediates may touch it")
            elif found.decision is GapDecision.PAGE:
                self._page(gap, found, paged, chosen)
            elif found.decision is GapDecision.PACK:
                self._pack(gap)
            elif found.decision is GapDecision.PACK_PAGE:
                self._pack_and_page(gap, found, chosen)
            else:
                self._reside(gap.tensor, found.stage, gap.before)
                self.rematerializations[found.stage % problem.size].append((gap.tensor, gap.version, False))

    def _reside(self, tensor: int, start: int, stop: int) -> None:
        size = self.problem.size
        self.resident[tensor, [s % size for s in range(start, stop)]] = True

    def _pack(self, gap: Gap) -> None:
        packing = self._packed(gap)
        if packing is not None:
            for s in range(gap.after + 1, gap.before):
                self.extra[s % self.problem.size] += packing.packed_bytes

    def _packed(self, gap: Gap) -> Packing | None:
        """Count packing and unpacking at the ends of a gap."""
        packing = self.problem.tensors[gap.tensor].packing(gap.version)
        if packing is None:
            self._fail(f"tensor {gap.tensor} cannot be packed")
            return None
        self.packing[gap.after] += packing.packed_bytes
        self.unpacking[gap.before % self.problem.size] += packing.packed_bytes
        self.extra_seconds += packing.seconds
        self.extra_joules += packing.joules
        return packing

    def _pack_and_page(self, gap: Gap, choice: Choice, chosen: dict[int, Choice]) -> None:
        problem, packing = self.problem, self._packed(gap)
        cost = None if packing is None else packing.paging_to(choice.target)
        if packing is None or cost is None:
            self._fail(f"the packed form of tensor {gap.tensor} cannot be paged to target {choice.target}")
            return
        if choice.stage != gap.before:
            self._fail(f"packed tensor {gap.tensor} returns at stage {choice.stage}, before it is used at {gap.before}")
        nbytes = packing.packed_bytes
        self.result.read_bytes += nbytes
        self.result.written_bytes += nbytes
        self.extra_joules += cost.joules_in + cost.joules_out
        earliest = page_out_ready(problem, gap, _rematerialized_at(problem, gap, chosen))
        if gap.before < earliest:
            self._fail(f"tensor {gap.tensor} is read back at stage {choice.stage}, before its write is done")
        if earliest > gap.after + 2:
            self.extra[(gap.after + 1) % problem.size] += nbytes
        if problem.semantics is not Semantics.POET:
            self._charge_transfers(gap, choice, nbytes, cost.seconds_in, cost.seconds_out)

    def _page(
        self, gap: Gap, choice: Choice, paged: dict[tuple[int, int, int], bool], chosen: dict[int, Choice]
    ) -> None:
        problem, tensor = self.problem, self.problem.tensors[gap.tensor]
        cost = next((p for p in tensor.paging if p.target == choice.target), None)
        if cost is None:
            self._fail(f"tensor {gap.tensor} cannot be paged to target {choice.target}")
            return
        self._reside(gap.tensor, choice.stage, gap.before)
        self.result.read_bytes += tensor.nbytes
        self.extra_joules += cost.joules_in
        for s in range(gap.after + 1, choice.stage):
            self.extra[s % problem.size] += cost.stored_bytes
        key = (gap.tensor, tensor.contents(gap.version), choice.target)
        held = self.paged_bytes.get(choice.target)
        unchanged = tensor.persistent and not tensor.writes
        first = problem.rewritten(gap.tensor, choice.target) or (key not in paged and not unchanged)
        paged[key] = True
        if tensor.persistent:
            self._sync(gap.tensor, choice.target)
        elif held is not None:
            held[[s % problem.size for s in range(gap.after, choice.stage)]] += tensor.nbytes
        if first:
            self.result.written_bytes += tensor.nbytes if held is None else 0
            self.extra_joules += cost.joules_out
        earliest = page_out_ready(problem, gap, _rematerialized_at(problem, gap, chosen)) if first else gap.after + 2
        if choice.stage < earliest:
            self._fail(f"tensor {gap.tensor} is read back at stage {choice.stage}, before its write is done")
        if first and earliest > gap.after + 2:
            self.extra[(gap.after + 1) % problem.size] += tensor.nbytes
        if problem.semantics is not Semantics.POET:
            self._charge_transfers(gap, choice, tensor.nbytes, cost.seconds_in, cost.seconds_out if first else None)

    def _sync(self, i: int, target: int) -> None:
        """Give a persistent tensor its copy in a target that is memory, unless it has one; other
        targets then have no page of it.
        """
        home = self.homes.setdefault(i, target)
        if home != target and not {home, target}.isdisjoint(self.paged_bytes):
            self._fail(
                f"persistent tensor {i} is paged to targets {home} and {target}; one of them is memory and has all of "
                "it"
            )
        if target in self.paged_bytes and (i, target) not in self.copies:
            self.copies.add((i, target))
            self.paged_bytes[target] += self.problem.tensors[i].nbytes

    def _charge_transfers(
        self, gap: Gap, choice: Choice, nbytes: int, seconds_in: float, seconds_out: float | None
    ) -> None:
        problem, link = self.problem, self.problem.link(choice.target)
        if problem.semantics is Semantics.ELASTIC:
            self.transfer_total[link] += seconds_in + (seconds_out or 0.0)
            return
        for s, part in read_window(problem, gap, choice.stage, seconds_in):
            self.transfers[link, s] += part
            self.extra[s] += nbytes
        for s, part in write_window(problem, gap, seconds_out) if seconds_out is not None else ():
            self.transfers[link, s] += part
            self.extra[s] += nbytes

    def _place_intermediates(self) -> None:
        for i, s in self.schedule.intermediates:
            if self.resident[i, s]:
                self._fail(f"tensor {i} is rematerialized as an intermediate at stage {s}, where it is resident")
            version = self.problem.tensors[i].version_before(s)
            self.rematerializations[s].append((i, version, True))

    def _place_slices(self) -> None:
        """Place a sliced update, which holds neither its streamed members nor its
        temporaries, but only slice buffers.
        """
        self.spared = np.zeros(self.problem.size)
        self.spared_before = np.zeros(self.problem.size)
        gaps = self.problem.gaps
        paged = {
            c.gap for c in self.schedule.choices if c.decision is GapDecision.PAGE and c.stage == gaps[c.gap].before
        }
        for k in self.schedule.sliced:
            slicing = self.problem.slicings[k]
            members = sum(self.problem.tensors[i].nbytes for i in slicing.members)
            around = [gaps_around(self.problem, i, slicing.stage) for i in slicing.members]
            if any(not sides or not paged.issuperset(sides) for sides in around):
                self._fail(
                    f"the update at stage {slicing.stage} is sliced, but not all that it streams is paged around it"
                )
            self.spared[slicing.stage] += members + slicing.saved_bytes - slicing.buffer_bytes
            self.spared_before[slicing.stage] += members

    def _place_variants(self) -> None:
        """Replace the stages of each group by those of its alternative, and record what that keeps in tiles."""
        groups, gaps = self.problem.groups, self.problem.gaps
        moved = (GapDecision.PAGE, GapDecision.RECOMPUTE)
        apart = {c.gap for c in self.schedule.choices if c.decision in moved and c.stage == gaps[c.gap].before}
        if len(dict(self.schedule.variants)) < len(self.schedule.variants):
            self._fail("a group of stages is decided twice")
        for c, k in self.schedule.variants:
            if not (0 <= c < len(groups) and 0 <= k < len(groups[c].alternatives)):
                self._fail(f"group {c} has no alternative {k}")
                continue
            chosen = groups[c].alternatives[k]
            self.extra_joules += chosen.joules
            for change in chosen.changes:
                self.seconds[change.stage] += change.seconds
                self.work[change.stage] += change.workspace_bytes
                self.fixed[change.stage] += change.fixed_bytes
            for saving in chosen.savings:
                if apart.issuperset(saving.gaps):
                    self.saved.update(((saving.tensor, s), saving.nbytes) for s in saving.stages)

    def _measure_memory(self) -> None:
        problem = self.problem
        sizes = np.array([t.nbytes for t in problem.tensors], dtype=float)
        load = sizes @ self.resident + self.fixed + self.extra
        for (_, s), nbytes in self.saved.items():
            load[s] -= nbytes
        born = np.zeros(problem.size)
        for i, t in enumerate(problem.tensors):
            if t.birth >= 0:
                born[t.birth] += t.nbytes - self.saved.get((i, t.birth), 0)
        self.result.load_bytes = load - self.spared + np.maximum(self.work, self.packing)
        unpacked = load - born - self.spared_before + self.unpacking
        self.result.load_bytes = np.where(
            self.unpacking > 0, np.maximum(self.result.load_bytes, unpacked), self.result.load_bytes
        )
        for s in sorted(self.rematerializations):
            peak = self._rematerialize_stage(s, float(load[s] - born[s] - self.spared_before[s]))
            self.result.load_bytes[s] = max(self.result.load_bytes[s], peak)
        self.result.peak_stage = int(np.argmax(self.result.load_bytes))
        self.result.peak_bytes = round(float(self.result.load_bytes[self.result.peak_stage]))

    def _rematerialize_stage(self, stage: int, load: float) -> float:
        """Run the rematerializations of one stage in the order of their first computation; return their peak bytes."""
        tensors = self.problem.tensors
        todo = self._in_order(self.rematerializations[stage])
        if len(todo) < len(self.rematerializations[stage]):
            self._fail(f"a tensor is rematerialized twice at stage {stage}")
        last_use = {}
        for i, v, _ in todo:
            rematerialization = (
                tensors[i].rematerializations[v] if 0 <= v < len(tensors[i].rematerializations) else None
            )
            if rematerialization is None:
                self._fail(f"tensor {i} cannot be rematerialized at stage {stage}")
                return load
            last_use.update({u: i for u, _ in rematerialization.inputs})
        there = {i: tensors[i].nbytes - self.saved.get((i, stage), 0) for i, _, _ in todo}
        load -= sum(there[i] for i, _, intermediate in todo if not intermediate)
        peak, pending = load, {i for i, _, _ in todo}
        made: dict[int, int] = {}
        for i, v, intermediate in todo:
            rematerialization = tensors[i].rematerializations[v]
            if rematerialization is None:
                continue
            for u, version in rematerialization.inputs:
                self._verify_input(stage, i, u, version, pending, made)
            made[i] = v
            load += there[i]
            peak = max(peak, load + rematerialization.workspace_bytes)
            self.result.recompute_seconds += rematerialization.seconds
            self.extra_joules += rematerialization.joules
            load -= sum(there[u] for u, _, gone in todo if gone and u in made and last_use.get(u, u) == i)
            if intermediate and i not in last_use:
                self._fail(f"tensor {i} is rematerialized at stage {stage}, but nothing there needs it")
        return peak

    def _in_order(self, todo: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
        """Return rematerializations in the order of their first computation, inputs first within one stage."""
        tensors = self.problem.tensors
        entries = {i: (i, v, intermediate) for i, v, intermediate in todo}
        ordered: dict[int, tuple[int, int, bool]] = {}
        seen: set[int] = (
            set()
        )  # after an in-place write, two rematerializations may need each other: reported as a missing input

        def visit(i: int) -> None:
            seen.add(i)
            rematerialization = tensors[i].rematerialization(entries[i][1])
            for u, _ in rematerialization.inputs if rematerialization else ():
                if u in entries and u not in seen:
                    visit(u)
            ordered[i] = entries[i]

        for i in sorted(entries, key=lambda i: (tensors[i].writes[entries[i][1]] if entries[i][1] >= 0 else -1, i)):
            if i not in seen:
                visit(i)
        return list(ordered.values())

    def _verify_input(self, stage: int, i: int, u: int, version: int, pending: set[int], made: dict[int, int]) -> None:
        tensor = self.problem.tensors[u]
        if u in pending:
            if made.get(u) != version:
                self._fail(f"tensor {i} is rematerialized at stage {stage} before its input {u}")
        elif not self.resident[u, stage] or tensor.birth == stage:
            self._fail(f"tensor {i} is rematerialized at stage {stage}, but its input {u} is not resident")
        elif tensor.version_before(stage) != version:
            self._fail(f"tensor {i} is rematerialized at stage {stage}, but its input {u} has changed since")

    def _measure_time(self) -> None:
        problem, result = self.problem, self.result
        if problem.semantics is Semantics.REAL:
            result.stall_seconds = float(np.maximum(self.transfers.max(axis=0) - self.seconds, 0.0).sum())
        compute_seconds = float(self.seconds.sum()) + result.recompute_seconds + self.extra_seconds
        if problem.semantics is Semantics.ELASTIC:  # a lower bound: a program decides what really overlaps
            result.stall_seconds = max(float(self.transfer_total.max()) - compute_seconds, 0.0)
        result.seconds = compute_seconds + result.stall_seconds
        result.static_joules = problem.static_watts * result.stall_seconds
        result.overhead_joules = self.extra_joules
        result.joules = problem.base_joules + self.extra_joules + result.static_joules

    def _verify_budgets(self) -> None:
        problem, result = self.problem, self.result
        if problem.ram_bytes is not None and result.peak_bytes > problem.ram_bytes * (1 + 1e-9):
            self._fail(f"stage {result.peak_stage} needs {result.peak_bytes} B, the budget is {problem.ram_bytes} B")
        for d, held in self.paged_bytes.items():
            limit = problem.limit_bytes(d) or 0
            if held.max(initial=0.0) > limit * (1 + 1e-9):
                self._fail(f"pages take {round(held.max())} B of {problem.targets[d]}, which has {limit} B for them")
        if problem.deadline_s is not None and result.seconds > problem.deadline_s * (1 + 1e-9):
            self._fail(f"the step takes {result.seconds:g} s, the deadline is {problem.deadline_s:g} s")
        if problem.write_limit_bytes is not None and result.written_bytes > problem.write_limit_bytes:
            self._fail(f"{result.written_bytes} B are written, the limit is {problem.write_limit_bytes:.0f} B")


def gaps_around(problem: Problem, tensor: int, stage: int) -> list[int]:
    """Return the gaps of a tensor that end or start at `stage`."""
    return [
        g for g in problem.gaps_of[tensor] if stage in (problem.gaps[g].after, problem.gaps[g].before % problem.size)
    ]


def _rematerialized_at(problem: Problem, gap: Gap, chosen: dict[int, Choice]) -> int | None:
    """Return the stage at which the tensor was rematerialized in the previous gap; None if it was not."""
    for g in problem.gaps_of[gap.tensor]:
        if problem.gaps[g].before == gap.after and g in chosen and chosen[g].decision is GapDecision.RECOMPUTE:
            return chosen[g].stage
    return None


def page_out_ready(problem: Problem, gap: Gap, rematerialized_at: int | None) -> int:
    """Return the earliest stage at which a tensor written out after `gap.after` can be restored.

    POET writes a tensor only in a stage at whose start it is in RAM. A tensor that appears in stage `gap.after` itself,
    by creation or rematerialization, must therefore stay one stage longer.
    """
    tensor = problem.tensors[gap.tensor]
    if problem.semantics is Semantics.POET and gap.after in (tensor.birth, rematerialized_at):
        return gap.after + 3
    # A weight used last in one step and first in the next has no idle stage, yet may change hands in between.
    return min(gap.after + 2, gap.before)
