"""The rows of the model that are about time.

Transfers beside compute, stalls, static power, the deadline.

Two versions. REAL: a transfer has fixed windows, its buffer is charged there, and what compute does not cover stalls the
stage. ELASTIC: how much of a transfer hides behind compute is a decision; what is hidden needs its buffer and a share
of the compute time around it, what is not stalls.
"""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from planner.milp.columns import Columns, GapColumns, Term
from planner.problem.model import Gap, Problem
from planner.problem.replay import read_window, write_window

BUCKETS = 32
"""The step is cut into this many pieces of equal compute time; within one, transfers may take any order."""

MAX_AHEAD_STAGES = 64


def eq7_stall(f: Columns) -> None:
    """stall[s] >= transfer seconds booked on stage s - its compute seconds."""
    problem = f.problem
    work: dict[int, list[Term]] = defaultdict(list)
    for g, columns in f.gaps.items():
        gap = problem.gaps[g]
        for paging in problem.tensors[gap.tensor].paging:
            out = write_window(problem, gap, paging.seconds_out)
            for (s, target), v in columns.page.items():
                if target == paging.target:
                    for t, part in (*read_window(problem, gap, s, paging.seconds_in), *out):
                        work[t].append((v, part / f.second_scale))
    for s, terms in sorted(work.items()):
        f.stalls[s] = f.model.column(f"stall({s})", _stall_cost(f), np.inf)
        seconds = problem.stages[s].seconds / f.second_scale
        f.model.row(f"eq7_stall({s})", [(f.stalls[s], 1.0), *((v, -a) for v, a in terms)], -seconds, np.inf)


def _stall_cost(f: Columns) -> float:
    return f.joules(f.problem.static_watts * f.second_scale)


def define_overlap(f: Columns) -> None:
    """Create h (read ahead) and w (write behind) of each gap that may be paged; both at most its page-ins."""
    for g, columns in f.gaps.items():
        for paging in f.problem.tensors[f.problem.gaps[g].tensor].paging:
            pages = [(v, -1.0) for (_, target), v in columns.page.items() if target == paging.target]
            if not pages:
                continue
            d, nbytes = paging.target, f.problem.tensors[f.problem.gaps[g].tensor].nbytes
            columns.read_ahead[d] = f.hiding_column(f"h({g},{d})", nbytes)
            f.model.row(f"eq7_read_hidden({g},{d})", [(columns.read_ahead[d], 1.0), *pages], -np.inf, 0.0)
            columns.write_behind[d] = f.hiding_column(f"w({g},{d})", nbytes)
            f.model.row(f"eq7_write_hidden({g},{d})", [(columns.write_behind[d], 1.0), *pages], -np.inf, 0.0)


def add_overlap_loads(f: Columns, gap: Gap, columns: GapColumns, loads: list[list[Term]]) -> None:
    """A transfer that hides behind compute holds its buffer meanwhile."""
    nbytes = f.problem.tensors[gap.tensor].nbytes / f.byte_scale
    for column, window in _hidden(f.problem, gap, columns):
        for t, _ in window:
            loads[t].append((column, nbytes))


def _hidden(problem: Problem, gap: Gap, columns: GapColumns) -> Iterator[tuple[int, list[tuple[int, float]]]]:
    """Yield the columns h and w of a gap.

    Each with the (stage, seconds) shares behind which its transfer hides.
    """
    for paging in problem.tensors[gap.tensor].paging:
        if paging.target in columns.read_ahead:
            yield columns.read_ahead[paging.target], _window(problem, gap, paging.seconds_in, -1)
            yield columns.write_behind[paging.target], _window(problem, gap, paging.seconds_out, 1)


def _window(problem: Problem, gap: Gap, seconds: float, step: int) -> list[tuple[int, float]]:
    """Return (stage, seconds) shares that cover a transfer at the gap's end (step -1) or start (+1)."""
    size, left = problem.size, seconds
    s = gap.before - 1 if step < 0 else gap.after + 1
    shares = []
    for _ in range(MAX_AHEAD_STAGES):
        if not gap.after < s < gap.before or left <= 0:
            break
        part = min(left, problem.stages[s % size].seconds)
        shares.append((s % size, part))
        left -= part
        s += step
    return shares


def eq7_bucket_stall(f: Columns) -> None:
    """Hidden transfer seconds within one piece of the step <= its compute seconds + stall of the piece."""
    problem = f.problem
    bucket_of = np.minimum(
        (np.cumsum([s.seconds for s in problem.stages]) / (problem.base_seconds or 1.0) * BUCKETS).astype(int),
        BUCKETS - 1,
    )
    work: list[list[Term]] = [[] for _ in range(BUCKETS)]
    for g, columns in f.gaps.items():
        for column, window in _hidden(problem, problem.gaps[g], columns):
            shares: dict[int, float] = defaultdict(float)
            for t, part in window:
                shares[int(bucket_of[t])] += part
            for b, part in shares.items():
                work[b].append((column, -part / f.second_scale))
    for _, s, rematerialization, v in f.rematerialization_columns():
        work[int(bucket_of[s])].append((v, rematerialization.seconds / f.second_scale))
    compute = np.zeros(BUCKETS)
    np.add.at(compute, bucket_of, [s.seconds for s in problem.stages])
    for b, terms in enumerate(work):
        if any(a < 0 for _, a in terms):
            f.bucket_stalls[b] = f.model.column(f"bucket_stall({b})", upper=np.inf)
            terms.append((f.bucket_stalls[b], 1.0))
            f.model.row(f"eq7_bucket_stall({b})", terms, -compute[b] / f.second_scale, np.inf)


def eq7_total_stall(f: Columns) -> None:
    """The step's stall covers all transfers that compute does not.

    And what is exposed or does not fit a piece.
    """
    problem = f.problem
    stall = f.stalls[-1] = f.model.column("stall", _stall_cost(f), np.inf)
    total: list[Term] = [(stall, 1.0)]
    exposed: list[Term] = [(stall, 1.0)]
    for g, columns in f.gaps.items():
        gap = problem.gaps[g]
        for paging in problem.tensors[gap.tensor].paging:
            seconds_in = paging.seconds_in / f.second_scale
            for (_, target), v in columns.page.items():
                if target == paging.target:
                    total.append((v, -seconds_in))
                    exposed.append((v, -seconds_in))
        for column, window in _hidden(problem, gap, columns):
            exposed.append((column, sum(part for _, part in window) / f.second_scale))
    for (i, _, target), v in f.page_out.items():
        seconds = next(p.seconds_out for p in problem.tensors[i].paging if p.target == target) / f.second_scale
        total.append((v, -seconds))
        exposed.append((v, -seconds))
    total += [
        (v, rematerialization.seconds / f.second_scale) for _, _, rematerialization, v in f.rematerialization_columns()
    ]
    f.model.row("eq7_total_stall", total, -problem.base_seconds / f.second_scale, np.inf)
    if not f.breadth.timeless:
        eq7_write_behind(f)
        f.exposed = exposed


def eq7_write_behind(f: Columns) -> None:
    """No more is hidden of a write than is written: sum of w over gaps with the same contents <= o."""
    found: dict[tuple[int, int, int], list[Term]] = defaultdict(list)
    for g, columns in f.gaps.items():
        gap = f.problem.gaps[g]
        contents = f.problem.tensors[gap.tensor].contents(gap.version)
        for target, v in columns.write_behind.items():
            found[gap.tensor, contents, target].append((v, 1.0))
    for key, terms in found.items():
        if key in f.page_out:
            terms.append((f.page_out[key], -1.0))
        f.model.row(f"eq7_write_behind({key[0]},{key[1]},{key[2]})", terms, -np.inf, 0.0)


def eq7_exposed_stall(f: Columns) -> None:
    """stall >= exposed reads and writes + stalls of the pieces."""
    f.model.row("eq7_exposed_stall", f.exposed + [(v, -1.0) for v in f.bucket_stalls.values()], 0.0, np.inf)
