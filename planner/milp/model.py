"""The idle-gap return MILP: one exactly-one row per idle gap instead of POET's T x T matrices.

Every constraint has its own function, its number in FORMULATION.md and its name in the model. Letters: k keep, x
recompute at a stage, y page in at a stage, q packed, o page out, a presence while a tensor is on its way back, c
intermediate rematerialization inside one stage, stall seconds a stage waits for transfers.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from planner.milp.highs import LinearModel, Vector
from planner.milp.memory_rows import define_slices, eq5_eq6_memory, eq10_slices
from planner.milp.time_rows import (
    define_overlap,
    eq7_bucket_stall,
    eq7_exposed_stall,
    eq7_stall,
    eq7_total_stall,
)
from planner.problem.model import Choice, Fate, Gap, Problem, Rematerialization, Schedule, Semantics
from planner.problem.replay import page_out_ready, transfers_fit

Term = tuple[int, float]

LARGE_TRANSFER_PERCENT = 1.0
"""Percent of the budget above which a tensor's transfer hides whole or not at all."""

DEAD_HOP = 0.2
"""A chain of rematerializations may pass this share of a level per tensor without later use (batch-norm outputs, views' copies)."""


@dataclass(frozen=True, slots=True)
class Breadth:
    """How many return stages the model offers per gap; None is all of them.

    `window`: stages before the next use at which a tensor may come back. `depth`: how many rematerializations deep a chain of
    intermediates may go through tensors that have a gap of their own. `early_pages`: page-ins before the next use too.
    """

    window: int | None = None
    depth: int | None = None
    early_pages: bool = True
    paging: bool = True
    recompute: bool = True
    inputs: bool = True
    """Rematerializations need their inputs; without this row and with window 0 the model is a small relaxation of all others."""
    exact_stages: bool = False
    """Free intermediates within a stage after their last use, instead of holding all of a stage together."""
    timeless: bool = False
    """Transfers only as a whole: their sum against the step's length. What is left is a valid bound."""
    optimistic: bool = False
    """For bounds: a rematerialization costs its own share only, and a stage needs no more than its fullest operator."""


@dataclass(slots=True)
class GapColumns:
    """Columns of one gap. `low`: first stage at which the tensor may return."""

    keep: int
    low: int
    recompute: dict[int, int] = field(default_factory=dict)
    page: dict[tuple[int, int], int] = field(default_factory=dict)
    packed: int | None = None
    presence: dict[int, int] = field(default_factory=dict)
    read_ahead: dict[int, int] = field(default_factory=dict)
    """Per target: whether, or how much of, the page-in at the gap's end is hidden behind compute (ELASTIC)."""
    write_behind: dict[int, int] = field(default_factory=dict)


class Formulation:
    """The model of `problem` at one breadth, the columns behind each decision, and the way back to a schedule."""

    def __init__(self, problem: Problem, breadth: Breadth, include: Schedule | None = None) -> None:
        """Build the model; whatever `include` decides is offered too, outside the breadth as well."""
        self.problem, self.breadth = problem, breadth
        self.include = include if include is not None else Schedule()
        self.model = LinearModel()
        self.gaps: dict[int, GapColumns] = {}
        self.intermediates: dict[tuple[int, int], int] = {}
        self.page_out: dict[tuple[int, int, int], int] = {}
        self.slices: dict[int, int] = {}
        self.stalls: dict[int, int] = {}
        self.bucket_stalls: dict[int, int] = {}
        self.exposed: list[Term] = []
        self.hiding: set[int] = set()
        """Integral columns that follow from the decisions: whether a large transfer hides."""
        self.byte_scale = (problem.ram_bytes or sum(t.nbytes for t in problem.tensors) or 1) / 100.0
        self.joule_scale = _joule_scale(problem)
        self.second_scale = problem.base_seconds / 100.0 or 1.0
        self.gap_at = _gap_lookup(problem)
        self.access_sets = [frozenset(t.accesses) for t in problem.tensors]
        self.fixed_gaps = _fixed_gaps(problem) - {choice.gap for choice in self.include.choices}
        self.slack = np.inf if problem.deadline_s is None else max(problem.deadline_s - problem.base_seconds, 0.0)
        self._build()

    def _build(self) -> None:
        breadth = self.breadth
        define_returns(self)
        if breadth.inputs:
            define_intermediates(self)
        define_slices(self)
        eq1_one_fate(self)
        eq2_presence(self)
        if breadth.inputs:
            eq3_inputs(self)
        eq4_page_out(self)
        if self.problem.semantics is Semantics.ELASTIC and not self.breadth.timeless:
            define_overlap(self)
        if self.problem.ram_bytes is not None:
            eq5_eq6_memory(self)
        if self.problem.semantics is Semantics.REAL:
            eq7_stall(self)
        elif self.problem.semantics is Semantics.ELASTIC:
            eq7_total_stall(self)
            if not self.breadth.timeless:
                eq7_bucket_stall(self)
                eq7_exposed_stall(self)
        eq8_deadline(self)
        eq9_wear(self)
        eq10_slices(self)

    def hiding_column(self, nbytes: int) -> int:
        """Create the column that says whether, or of a small tensor how much of, a transfer hides behind compute.

        A transfer under way holds its whole buffer; only of small tensors a share is near enough.
        """
        large = nbytes / self.byte_scale > LARGE_TRANSFER_PERCENT
        column = self.model.column(integral=large)
        if large:
            self.hiding.add(column)
        return column

    def joules(self, value: float) -> float:
        """Return the cost coefficient of `value` joules."""
        return value / self.joule_scale

    def rematerialization_joules(self, rematerialization: Rematerialization) -> float:
        """Return the cost coefficient of a rematerialization."""
        return self.joules(rematerialization.joules * (rematerialization.own_share if self.breadth.optimistic else 1.0))

    def rematerialization_of(self, gap: Gap) -> Rematerialization | None:
        """Return how the contents in `gap` are rematerialized, if they can be within the deadline."""
        rematerializations = self.problem.tensors[gap.tensor].rematerializations
        if not self.breadth.recompute or not 0 <= gap.version < len(rematerializations):
            return None
        rematerialization = rematerializations[gap.version]
        if rematerialization is None:
            return None
        seconds = rematerialization.seconds * (rematerialization.own_share if self.breadth.optimistic else 1.0)
        return rematerialization if seconds <= self.slack * (1 + 1e-12) else None

    def presence(self, tensor: int, version: int, stage: int) -> list[Term] | None:
        """Return the columns whose sum says that `version` of `tensor` is there when `stage` starts; None: always."""
        problem = self.problem
        info = problem.tensors[tensor]
        if stage in self.access_sets[tensor]:
            there = stage != info.birth and info.version_before(stage) == version
            return None if there else []
        g = self.gap_at[tensor].get(stage)
        if g is None or problem.gaps[g].version != version:
            return []
        if not problem.gaps[g].dead and g not in self.gaps:
            return None
        return self._gap_presence(g, stage) + self._intermediate_terms(tensor, stage)

    def _gap_presence(self, g: int, stage: int) -> list[Term]:
        if g not in self.gaps:
            return []
        gap, columns = self.problem.gaps[g], self.gaps[g]
        unrolled = stage if stage > gap.after else stage + self.problem.size
        return [(columns.presence.get(unrolled, columns.keep), 1.0)]

    def _intermediate_terms(self, tensor: int, stage: int) -> list[Term]:
        column = self.intermediates.get((tensor, stage))
        return [] if column is None else [(column, 1.0)]

    def schedule(self, values: Vector) -> Schedule:
        """Return the decisions behind a solution; intermediates that nothing uses are left out."""
        choices = []
        for g, columns in self.gaps.items():
            fate = next((s for s, v in columns.recompute.items() if values[v] > 0.5), None)
            if fate is not None:
                choices.append(Choice(g, fate, Fate.RECOMPUTE))
            for (s, target), v in columns.page.items():
                if values[v] > 0.5:
                    choices.append(Choice(g, s, Fate.PAGE, target))
            if columns.packed is not None and values[columns.packed] > 0.5:
                choices.append(Choice(g, self.problem.gaps[g].before, Fate.PACK))
        intermediates = {key for key, v in self.intermediates.items() if values[v] > 0.5}
        schedule = prune_intermediates(self.problem, tuple(sorted(choices, key=lambda c: c.gap)), intermediates)
        return replace(schedule, sliced=tuple(k for k, v in sorted(self.slices.items()) if values[v] > 0.5))

    def rematerialization_columns(self) -> Iterator[tuple[int, int, Rematerialization, int]]:
        """Yield (tensor, stage, rematerialization, column) of every x and c."""
        problem = self.problem
        for g, columns in self.gaps.items():
            gap = problem.gaps[g]
            rematerialization = (
                problem.tensors[gap.tensor].rematerializations[gap.version] if columns.recompute else None
            )
            if rematerialization is not None:
                for s, v in columns.recompute.items():
                    yield gap.tensor, s % problem.size, rematerialization, v
        for (i, s), v in self.intermediates.items():
            rematerialization = problem.tensors[i].rematerializations[problem.gaps[self.gap_at[i][s]].version]
            if rematerialization is not None:
                yield i, s, rematerialization, v

    def decisions(self) -> list[int]:
        """Return the integral columns that are decided; those of `hiding` follow."""
        return [c for c, flag in enumerate(self.model.integral) if flag and c not in self.hiding]

    def start_values(self, schedule: Schedule) -> dict[int, float] | None:
        """Return the integral columns of decisions under `schedule`; None if the model does not offer one of them."""
        values = dict.fromkeys(self.decisions(), 0.0)
        chosen = {c.gap: c for c in schedule.choices}
        for g, columns in self.gaps.items():
            choice = chosen.pop(g, None)
            if choice is None:
                values[columns.keep] = 1.0
                continue
            found = {
                Fate.RECOMPUTE: columns.recompute.get(choice.stage),
                Fate.PAGE: columns.page.get((choice.stage, choice.target)),
                Fate.PACK: columns.packed,
                Fate.KEEP: columns.keep,
            }[choice.fate]
            if found is None:
                return None
            values[found] = 1.0
        if chosen or any(key not in self.intermediates for key in schedule.intermediates):
            return None
        if any(k not in self.slices for k in schedule.sliced):
            return None
        values.update({self.intermediates[key]: 1.0 for key in schedule.intermediates})
        values.update({self.slices[k]: 1.0 for k in schedule.sliced})
        return values


def _joule_scale(problem: Problem) -> float:
    """Return the joules of a typical decision: with raw joules, solvers stop at gaps above the whole overhead."""
    sizes = [p.joules_in + p.joules_out for t in problem.tensors for p in t.paging[:1]]
    sizes = sizes or [r.joules for t in problem.tensors for r in t.rematerializations if r is not None]
    positive = [s for s in sizes if s > 0]
    return float(np.median(positive)) if positive else 1.0


def _gap_lookup(problem: Problem) -> list[dict[int, int]]:
    """Per tensor: idle stage -> gap."""
    found: list[dict[int, int]] = [{} for _ in problem.tensors]
    for g, gap in enumerate(problem.gaps):
        for s in range(gap.after + 1, gap.before):
            found[gap.tensor][s % problem.size] = g
    return found


def _fixed_gaps(problem: Problem) -> set[int]:
    """Return the gaps that nothing but keeping can bridge, or that cover no stage where memory is short.

    A gap next to a short stage counts as covering it if its tensor may be streamed there in slices.
    """
    size = problem.size
    load = np.zeros(size)
    for stage, s in zip(problem.stages, range(size), strict=True):
        load[s] = stage.fixed_bytes + stage.workspace_bytes
    intermediate = 0.0
    for t in problem.tensors:
        load[list(t.accesses)] += t.nbytes
    for gap in problem.gaps:
        if not gap.dead:
            load[[s % size for s in range(gap.after + 1, gap.before)]] += problem.tensors[gap.tensor].nbytes
    if problem.ram_bytes is None:
        return {g for g, gap in enumerate(problem.gaps) if not gap.dead}
    tight = load + intermediate > problem.ram_bytes
    streamed = {(i, slicing.stage) for slicing in problem.slicings if tight[slicing.stage] for i in slicing.members}
    fixed = set()
    for g, gap in enumerate(problem.gaps):
        tensor = problem.tensors[gap.tensor]
        if gap.dead:
            continue
        movable = (
            tensor.nbytes > 0
            and not tensor.pinned
            and (
                tensor.paging
                or tensor.packing
                or (0 <= gap.version < len(tensor.rematerializations) and tensor.rematerializations[gap.version])
            )
        )
        ends = {(gap.tensor, gap.after), (gap.tensor, gap.before % size)}
        short = tight[[s % size for s in range(gap.after + 1, gap.before)]].any() or not ends.isdisjoint(streamed)
        if not movable or not short:
            fixed.add(g)
    return fixed


def define_returns(f: Formulation) -> None:
    """Create k, x, y, q of every gap that may be bridged otherwise than by keeping."""
    included = {c.gap: c for c in f.include.choices}
    for g, gap in enumerate(f.problem.gaps):
        if gap.dead or g in f.fixed_gaps:
            continue
        low = gap.after + 1 if f.breadth.window is None else max(gap.after + 1, gap.before - f.breadth.window)
        stages = list(range(low, gap.before + 1))
        known = included.get(g)
        if known is not None and known.stage < low:
            stages.insert(0, known.stage)
        columns = GapColumns(f.model.column(integral=True), stages[0])
        rematerialization = f.rematerialization_of(gap)
        if rematerialization is not None and not gap.before > f.problem.size:
            columns.recompute = {
                s: f.model.column(f.rematerialization_joules(rematerialization), integral=True) for s in stages
            }
        if f.breadth.paging:
            extra = known.stage if known is not None and known.fate is Fate.PAGE else gap.before
            pages = [s for s in stages if f.breadth.early_pages or s in (gap.before, extra)]
            _define_pages(f, gap, columns, pages)
        packing = f.problem.tensors[gap.tensor].packing
        if packing is not None and packing.seconds <= f.slack:
            columns.packed = f.model.column(f.joules(packing.joules), integral=True)
        f.gaps[g] = columns


def _define_pages(f: Formulation, gap: Gap, columns: GapColumns, stages: list[int]) -> None:
    earliest = page_out_ready(f.problem, gap, None)
    for paging in f.problem.tensors[gap.tensor].paging:
        for s in stages:
            if s >= earliest and transfers_fit(f.problem, gap, paging, s):
                column = f.model.column(f.joules(paging.joules_in), integral=True)
                columns.page[s, paging.target] = column


def define_intermediates(f: Formulation) -> None:
    """Create c[i, s] where a rematerialization at stage s may need tensor i while it is gone, also after its last access."""
    problem = f.problem
    reach: list[dict[int, float]] = [{} for _ in problem.tensors]
    for g, columns in f.gaps.items():
        gap = problem.gaps[g]
        for s in columns.recompute:
            reach[gap.tensor][s % problem.size] = 0
    todo = [(i, s) for i in range(len(problem.tensors)) for s in reach[i]]
    while todo:
        j, s = todo.pop()
        for u in {
            u
            for rematerialization in problem.tensors[j].rematerializations
            if rematerialization
            for u, _ in rematerialization.inputs
        }:
            if _offer_intermediate(f, u, s, reach[j][s], f.breadth.depth, reach[u]):
                todo.append((u, s))
    for i, s in f.include.intermediates:
        _offer_intermediate(f, i, s, 0, None, reach[i])


def _offer_intermediate(
    f: Formulation, i: int, s: int, depth: float, limit: int | None, reach: dict[int, float]
) -> bool:
    """Create c[i, s] if it makes sense there; say whether its own inputs must be looked at (again)."""
    g = f.gap_at[i].get(s)
    if g is None or (g not in f.gaps and not f.problem.gaps[g].dead):
        return False
    gap = f.problem.gaps[g]
    rematerialization = f.rematerialization_of(gap)
    deeper = depth + (DEAD_HOP if gap.dead else 1.0)
    if rematerialization is None or (limit is not None and deeper > limit):
        return False
    if (i, s) not in f.intermediates:
        f.intermediates[i, s] = f.model.column(f.rematerialization_joules(rematerialization), integral=True)
    if s in reach and reach[s] <= deeper:
        return False
    reach[s] = deeper
    return True


def eq1_one_fate(f: Formulation) -> None:
    """k + sum of x + sum of y + q = 1 for every gap."""
    for g, columns in f.gaps.items():
        terms = [(columns.keep, 1.0)]
        terms += [(v, 1.0) for v in columns.recompute.values()]
        terms += [(v, 1.0) for v in columns.page.values()]
        if columns.packed is not None:
            terms.append((columns.packed, 1.0))
        f.model.row(f"eq1_one_fate[{g}]", terms, 1.0, 1.0)


def eq2_presence(f: Formulation) -> None:
    """a[g,s] = a[g,s-1] + x[g,s] + y[g,s]: once back, a tensor stays until its next use."""
    for g, columns in f.gaps.items():
        previous = columns.keep
        returns: dict[int, list[int]] = defaultdict(list)
        for s, v in columns.recompute.items():
            returns[s].append(v)
        for (s, _), v in columns.page.items():
            returns[s].append(v)
        for s in range(columns.low, f.problem.gaps[g].before):
            if returns[s]:
                present = f.model.column()
                terms = [(present, 1.0), (previous, -1.0), *((v, -1.0) for v in returns[s])]
                f.model.row(f"eq2_presence[{g},{s}]", terms, 0.0, 0.0)
                previous = present
            columns.presence[s] = previous


def eq3_inputs(f: Formulation) -> None:
    """A rematerialization at stage s needs each input there: x or c <= a[u,s] + c[u,s]."""
    for i, s, rematerialization, v in f.rematerialization_columns():
        for u, version in rematerialization.inputs:
            terms = f.presence(u, version, s)
            if terms is not None:
                f.model.row(f"eq3_inputs[{i},{s},{u}]", [(v, 1.0), *((c, -a) for c, a in terms)], -np.inf, 0.0)


def eq4_page_out(f: Formulation) -> None:
    """o[i,v,d] >= sum of the page-ins of each gap: contents are written once, then read as often as needed."""
    model = f.model
    for g, columns in f.gaps.items():
        gap = f.problem.gaps[g]
        tensor = f.problem.tensors[gap.tensor]
        clean = tensor.persistent and not tensor.writes
        for paging in tensor.paging if not clean else ():
            reads = [v for (_, target), v in columns.page.items() if target == paging.target]
            if not reads:
                continue
            key = (gap.tensor, tensor.contents(gap.version), paging.target)
            if key not in f.page_out:
                f.page_out[key] = model.column(f.joules(paging.joules_out))
            terms = [(f.page_out[key], -1.0), *((v, 1.0) for v in reads)]
            model.row(f"eq4_page_out[{g},{paging.target}]", terms, -np.inf, 0.0)


def eq8_deadline(f: Formulation) -> None:
    """Recompute, packing and stall seconds fit between the step's own time and the deadline."""
    problem = f.problem
    if problem.deadline_s is None:
        return
    share = f.breadth.optimistic
    terms = [
        (v, rematerialization.seconds * (rematerialization.own_share if share else 1.0) / f.second_scale)
        for _, _, rematerialization, v in f.rematerialization_columns()
    ]
    for g, columns in f.gaps.items():
        packing = problem.tensors[problem.gaps[g].tensor].packing
        if columns.packed is not None and packing is not None:
            terms.append((columns.packed, packing.seconds / f.second_scale))
    terms += [(v, 1.0) for v in f.stalls.values()]
    slack = (problem.deadline_s - problem.base_seconds) / f.second_scale
    if slack < -1e-9:
        f.model.impossible.append("eq8_deadline")
    f.model.row("eq8_deadline", terms, -np.inf, max(slack, 0.0))


def eq9_wear(f: Formulation) -> None:
    """Bytes written to flash per step stay within the limit."""
    limit = f.problem.write_limit_bytes
    if limit is None:
        return
    terms = [(v, f.problem.tensors[i].nbytes / f.byte_scale) for (i, _, _), v in f.page_out.items()]
    f.model.row("eq9_wear", terms, -np.inf, limit / f.byte_scale)


def prune_intermediates(problem: Problem, choices: tuple[Choice, ...], wanted: set[tuple[int, int]]) -> Schedule:
    """Return the schedule without intermediates that are resident anyway or that no rematerialization of their stage reads."""
    chosen = {choice.gap: choice for choice in choices}
    todo = [
        (problem.gaps[c.gap].tensor, problem.gaps[c.gap].version, c.stage % problem.size)
        for c in choices
        if c.fate is Fate.RECOMPUTE
    ]
    back = {(i, s) for i, _, s in todo}
    kept: set[tuple[int, int]] = set()
    while todo:
        i, version, s = todo.pop()
        rematerialization = problem.tensors[i].rematerializations[version]
        for u, v in rematerialization.inputs if rematerialization is not None else ():
            if (u, s) in wanted and (u, s) not in kept | back and not _present(problem, chosen, u, s):
                kept.add((u, s))
                todo.append((u, v, s))
    return Schedule(choices, tuple(sorted(kept)))


def _present(problem: Problem, chosen: dict[int, Choice], tensor: int, stage: int) -> bool:
    """Say whether a tensor is resident at `stage`: in use there, kept through an idle gap, or back already."""
    if stage in problem.tensors[tensor].accesses:
        return stage != problem.tensors[tensor].birth
    for g in problem.gaps_of[tensor]:
        gap = problem.gaps[g]
        at = stage if stage > gap.after else stage + problem.size
        if gap.after < at < gap.before and not gap.dead:
            choice = chosen.get(g)
            return choice is None or (choice.fate is not Fate.PACK and at >= choice.stage)
    return False
