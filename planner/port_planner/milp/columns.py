"""The columns of the planning model: the decisions about each gap, with the letters of FORMULATION.md."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from port_planner.milp.highs import LinearModel, Vector
from port_planner.problem.problem import Gap, GapDecision, Packing, Problem, Rematerialization, Schedule
from port_planner.problem.replay import page_out_ready, transfers_fit

Term = tuple[int, float]
"""A column and its factor in a row."""

LARGE_TRANSFER_PERCENT = 1.0
"""Percent of the budget above which a tensor's transfer is hidden as a whole or not at all."""

DEAD_HOP = 0.2
"""A chain may pass this share of a level per tensor without later use (batch-norm outputs, views' copies)."""


@dataclass(frozen=True, slots=True)
class Breadth:
    """How many return stages the model offers per gap; None offers all of them.

    `window`: stages before the next use at which a tensor may come back. `depth`: how many
    rematerializations deep a chain of intermediates may go through tensors that have a gap of their own.
    `early_pages`: page-ins before the next use too.
    """

    window: int | None = None
    depth: int | None = None
    early_pages: bool = True
    paging: bool = True
    recompute: bool = True
    inputs: bool = True
    """Whether rematerializations need their inputs; if not, with window 0, the model is a small
    relaxation of all others.
    """
    sources: bool = False
    """Whether rematerializations need their inputs somewhere in their gap; for bounds without `inputs`."""
    exact_stages: bool = False
    """Free intermediates within a stage after their last use, instead of holding all of a stage together."""
    timeless: bool = False
    """Whether transfers are counted only as a whole: their sum against the step's length.

    The result is still a valid bound.
    """
    optimistic: bool = False
    """Whether a rematerialization costs only its own share, and a stage needs no more than its fullest operator; for
    bounds."""


@dataclass(slots=True)
class GapColumns:
    """Columns of one gap. `low`: first stage at which the tensor may return."""

    keep: int
    low: int
    recompute: dict[int, int] = field(default_factory=dict)
    page: dict[tuple[int, int], int] = field(default_factory=dict)
    packed: int | None = None
    packed_page: dict[int, int] = field(default_factory=dict)
    """Per target: packed, and the packed form paged there."""
    presence: dict[int, int] = field(default_factory=dict)
    read_ahead: dict[int, int] = field(default_factory=dict)
    """Per target: whether, or how much of, the page-in at the gap's end is hidden behind compute (ELASTIC)."""
    write_behind: dict[int, int] = field(default_factory=dict)
    packed_read_ahead: dict[int, int] = field(default_factory=dict)
    packed_write_behind: dict[int, int] = field(default_factory=dict)
    """Like `read_ahead` and `write_behind`, for packed forms."""

    def packing(self) -> list[int]:
        """Return the columns under which the tensor is packed through the gap."""
        return [*([] if self.packed is None else [self.packed]), *self.packed_page.values()]


class Columns:
    """The columns behind each decision, what they stand for, and the scales of the model's units.

    Bytes, joules and seconds are scaled so that coefficients lie near 1: `byte_scale`, `joule_scale` and `second_scale`
    are what one unit of the model is worth.
    """

    def __init__(self, problem: Problem, breadth: Breadth, include: Schedule | None = None) -> None:
        """Build the model; it also offers whatever `include` decides, even outside the breadth."""
        self.problem, self.breadth = problem, breadth
        self.include = include if include is not None else Schedule()
        chosen = dict(self.include.variants)
        self.known_variants = {(c, chosen.get(c, 0)) for c in range(len(problem.groups) if include is not None else 0)}
        """(group, alternative) in the decisions of `include`."""
        self.model = LinearModel()
        self.gaps: dict[int, GapColumns] = {}
        self.intermediates: dict[tuple[int, int], int] = {}
        self.sources: dict[int, int] = {}
        """Gap -> in bounds, the column that counts how often its tensor is rematerialized in it only for others."""
        self.page_out: dict[tuple[int, int, int], int] = {}
        self.slices: dict[int, int] = {}
        self.variants: dict[tuple[int, int], int] = {}
        """Columns of alternatives, by group and alternative."""
        self.savings: dict[tuple[int, int, int], int] = {}
        """The column with the amount saved, by group, alternative and number of its saving."""
        self.stalls: dict[int, int] = {}
        self.bucket_stalls: dict[tuple[int, int], int] = {}
        """Columns of stalls, by link and part of the step."""
        self.exposed: dict[int, list[Term]] = {}
        """Columns of transfer time that no compute hides, by link."""
        self.hiding: set[int] = set()
        """Integral columns that follow from the decisions: whether a large transfer is hidden."""
        self.byte_scale = (problem.ram_bytes or sum(t.nbytes for t in problem.tensors) or 1) / 100.0
        self.joule_scale = _joule_scale(problem)
        self.second_scale = problem.base_seconds / 100.0 or 1.0
        self.access_sets = [frozenset(t.accesses) for t in problem.tensors]
        self.fixed_gaps = _fixed_gaps(problem) - {choice.gap for choice in self.include.choices}
        fastest_s = problem.base_seconds + sum(min(one.seconds for one in g.alternatives) for g in problem.groups)
        self.slack = np.inf if problem.deadline_s is None else max(problem.deadline_s - fastest_s, 0.0)

    def hiding_column(self, name: str, nbytes: int) -> int:
        """Create the column that says whether a transfer is hidden behind compute or, for a
        small tensor, how much of it.

        A running transfer holds its whole buffer; only for small tensors a fraction is accurate enough.
        """
        large = nbytes / self.byte_scale > LARGE_TRANSFER_PERCENT
        column = self.model.column(name, integral=large)
        if large:
            self.hiding.add(column)
        return column

    def page_out_key(self, g: int, target: int) -> tuple[int, int, int]:
        """Return a gap's key in `page_out`: column by contents, or by gap if each gap writes them again."""
        gap = self.problem.gaps[g]
        tensor = self.problem.tensors[gap.tensor]
        if not self.problem.rewritten(gap.tensor, target):
            return gap.tensor, tensor.contents(gap.version), target
        return gap.tensor, len(tensor.writes) + g, target

    def joules(self, value: float) -> float:
        """Return the cost coefficient of `value` joules."""
        return value / self.joule_scale

    def rematerialization_joules(self, rematerialization: Rematerialization) -> float:
        """Return the cost coefficient of a rematerialization."""
        return self.joules(rematerialization.joules * (rematerialization.own_share if self.breadth.optimistic else 1.0))

    def rematerialization_of(self, gap: Gap) -> Rematerialization | None:
        """Return how the contents in `gap` are rematerialized, if the deadline allows it."""
        rematerializations = self.problem.tensors[gap.tensor].rematerializations
        if not self.breadth.recompute or not 0 <= gap.version < len(rematerializations):
            return None
        rematerialization = rematerializations[gap.version]
        if rematerialization is None:
            return None
        seconds = rematerialization.seconds * (rematerialization.own_share if self.breadth.optimistic else 1.0)
        return rematerialization if seconds <= self.slack * (1 + 1e-12) else None

    def presence(self, tensor: int, version: int, stage: int) -> list[Term] | None:
        """Return the columns whose sum says whether a version of a tensor is there when
        `stage` starts; None: always.
        """
        problem = self.problem
        info = problem.tensors[tensor]
        if stage in self.access_sets[tensor]:
            there = stage != info.birth and info.version_before(stage) == version
            return None if there else []
        g = problem.gap_at(tensor, stage)
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
            idle = problem.gap_at(i, s)
            how = None if idle is None else problem.tensors[i].rematerializations[problem.gaps[idle].version]
            if how is not None:
                yield i, s, how, v

    def source_columns(self) -> Iterator[tuple[Rematerialization, int]]:
        """Yield (rematerialization, column) of every m."""
        for h, v in self.sources.items():
            how = self.rematerialization_of(self.problem.gaps[h])
            if how is not None:
                yield how, v


def _joule_scale(problem: Problem) -> float:
    """Return the joules of a typical decision: with raw joules, solvers stop at gaps above the whole overhead."""
    sizes = [p.joules_in + p.joules_out for t in problem.tensors for p in t.paging[:1]]
    sizes = sizes or [r.joules for t in problem.tensors for r in t.rematerializations if r is not None]
    positive = [s for s in sizes if s > 0]
    return float(np.median(positive)) if positive else 1.0


def _fixed_gaps(problem: Problem) -> set[int]:
    """Return the gaps that can only be kept, or that cover no stage where memory is short.

    A gap next to a short stage counts as covering it if its tensor may be streamed there in
    slices, or is there in tiles.
    """
    size = problem.size
    load = np.zeros(size)
    for stage, s in zip(problem.stages, range(size), strict=True):
        load[s] = stage.fixed_bytes + stage.workspace_bytes
    for t in problem.tensors:
        load[list(t.accesses)] += t.nbytes
    alive = [g for g, gap in enumerate(problem.gaps) if not gap.dead]
    if problem.ram_bytes is None:
        return set(alive)
    load += kept_bytes(problem, alive) + _max_by_variants(problem)
    tiled = {g for group in problem.groups for one in group.alternatives for n in one.savings for g in n.gaps}
    tight = load > problem.ram_bytes
    streamed = {(i, slicing.stage) for slicing in problem.slicings if tight[slicing.stage] for i in slicing.members}
    tight_before = np.concatenate(([0], np.cumsum([*tight, *tight])))
    fixed = set()
    for g in alive:
        gap = problem.gaps[g]
        tensor = problem.tensors[gap.tensor]
        movable = (
            tensor.nbytes > 0
            and not tensor.pinned
            and (
                tensor.paging
                or tensor.packing(gap.version)
                or (0 <= gap.version < len(tensor.rematerializations) and tensor.rematerializations[gap.version])
            )
        )
        ends = {(gap.tensor, gap.after), (gap.tensor, gap.before % size)}
        short = tight_before[gap.before] > tight_before[gap.after + 1] or not ends.isdisjoint(streamed)
        if not movable or not (short or g in tiled):
            fixed.add(g)
    return fixed


def kept_bytes(problem: Problem, gaps: Iterable[int]) -> Vector:
    """Return, by stage, the bytes of tensors that are kept through these gaps."""
    changes = np.zeros(2 * problem.size + 1)
    for g in gaps:
        gap = problem.gaps[g]
        changes[gap.after + 1] += problem.tensors[gap.tensor].nbytes
        changes[gap.before] -= problem.tensors[gap.tensor].nbytes
    kept = np.cumsum(changes)[:-1]
    return kept[: problem.size] + kept[problem.size :]


def _max_by_variants(problem: Problem) -> Vector:
    """Return the most bytes that the alternatives of all groups may add to each stage."""
    most = np.zeros(problem.size)
    for group in problem.groups:
        more = np.zeros(problem.size)
        for one in group.alternatives:
            for change in one.changes:
                more[change.stage] = max(more[change.stage], change.fixed_bytes + change.workspace_bytes)
        most += more
    return most


def define_returns(f: Columns) -> None:
    """Create k, x, y, q, p of every gap that may be bridged in other ways than keeping."""
    included = {c.gap: c for c in f.include.choices}
    for g, gap in enumerate(f.problem.gaps):
        if gap.dead or g in f.fixed_gaps:
            continue
        low = gap.after + 1 if f.breadth.window is None else max(gap.after + 1, gap.before - f.breadth.window)
        stages = list(range(low, gap.before + 1))
        known = included.get(g)
        if known is not None and known.stage < low:
            stages.insert(0, known.stage)
        columns = GapColumns(f.model.column(f"k({g})", integral=True), stages[0])
        rematerialization = f.rematerialization_of(gap)
        if rematerialization is not None and not gap.before > f.problem.size:
            joules = f.rematerialization_joules(rematerialization)
            columns.recompute = {s: f.model.column(f"x({g},{s})", joules, integral=True) for s in stages}
        if f.breadth.paging:
            extra = known.stage if known is not None and known.decision is GapDecision.PAGE else gap.before
            pages = [s for s in stages if f.breadth.early_pages or s in (gap.before, extra)]
            _define_pages(f, g, columns, pages)
        packing = f.problem.tensors[gap.tensor].packing(gap.version)
        if packing is not None and packing.seconds <= f.slack:
            columns.packed = f.model.column(f"q({g})", f.joules(packing.joules), integral=True)
            if f.breadth.paging:
                _define_packed_pages(f, g, columns, packing)
        f.gaps[g] = columns


def _define_pages(f: Columns, g: int, columns: GapColumns, stages: list[int]) -> None:
    gap = f.problem.gaps[g]
    earliest = page_out_ready(f.problem, gap, None)
    for paging in f.problem.tensors[gap.tensor].paging:
        for s in stages:
            if s >= earliest and transfers_fit(f.problem, gap, paging, s):
                name = f"y({g},{s},{paging.target})"
                columns.page[s, paging.target] = f.model.column(name, f.joules(paging.joules_in), integral=True)


def _define_packed_pages(f: Columns, g: int, columns: GapColumns, packing: Packing) -> None:
    gap = f.problem.gaps[g]
    if gap.before < page_out_ready(f.problem, gap, None):
        return
    for paging in packing.paging:
        if transfers_fit(f.problem, gap, paging, gap.before):
            joules = packing.joules + paging.joules_in + paging.joules_out
            columns.packed_page[paging.target] = f.model.column(
                f"p({g},{paging.target})", f.joules(joules), integral=True
            )


def define_intermediates(f: Columns) -> None:
    """Create c[i, s] where a rematerialization at stage s may need tensor i while it is gone,
    also after its last access.
    """
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


def _offer_intermediate(f: Columns, i: int, s: int, depth: float, limit: int | None, reach: dict[int, float]) -> bool:
    """Create c[i, s] if it is useful there; return whether its own inputs must be examined (again)."""
    g = f.problem.gap_at(i, s)
    if g is None or (g not in f.gaps and not f.problem.gaps[g].dead):
        return False
    gap = f.problem.gaps[g]
    rematerialization = f.rematerialization_of(gap)
    deeper = depth + (DEAD_HOP if gap.dead else 1.0)
    if rematerialization is None or (limit is not None and deeper > limit):
        return False
    if (i, s) not in f.intermediates:
        joules = f.rematerialization_joules(rematerialization)
        f.intermediates[i, s] = f.model.column(f"c({i},{s})", joules, integral=True)
    if s in reach and reach[s] <= deeper:
        return False
    reach[s] = deeper
    return True
