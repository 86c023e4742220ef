"""The time rows of the model: transfers alongside compute, stalls, static power, the deadline.

There are two versions. REAL: a transfer has fixed windows, its buffer is charged there, and what compute does not cover
stalls the stage. ELASTIC: how much of a transfer hides behind compute is a decision. The hidden part needs its buffer
and a share of the compute time around it; the rest stalls.
"""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from port_planner.milp.columns import Columns, GapColumns, Term
from port_planner.milp.held_bytes import HeldBytes
from port_planner.milp.variant_rows import variant_seconds
from port_planner.problem.problem import Gap, Paging, Problem
from port_planner.problem.replay import read_window, write_window

BUCKETS = 32
"""Segments of equal compute time that the step is cut into; within one, transfers may take any order."""

MAX_AHEAD_STAGES = 64


def eq7_stall(f: Columns) -> None:
    """stall[s] >= transfer seconds booked on stage s - its compute seconds, for each link."""
    problem = f.problem
    work: dict[tuple[int, int], list[Term]] = defaultdict(list)
    for g, columns in f.gaps.items():
        gap = problem.gaps[g]
        for paging in problem.tensors[gap.tensor].paging:
            out = write_window(problem, gap, paging.seconds_out)
            for (s, target), v in columns.page.items():
                if target == paging.target:
                    for t, part in (*read_window(problem, gap, s, paging.seconds_in), *out):
                        work[t, problem.link(target)].append((v, part / f.second_scale))
        for paging, v in _packed_pages(problem, gap, columns):
            reads = read_window(problem, gap, gap.before, paging.seconds_in)
            for t, part in (*reads, *write_window(problem, gap, paging.seconds_out)):
                work[t, problem.link(paging.target)].append((v, part / f.second_scale))
    variants = variant_seconds(f)
    for (s, link), terms in sorted(work.items()):
        if s not in f.stalls:
            f.stalls[s] = f.model.column(f"stall({s})", _stall_cost(f), np.inf)
        seconds = problem.stages[s].seconds / f.second_scale
        row = [(f.stalls[s], 1.0), *((v, -a) for v, a in terms), *variants[s]]
        f.model.row(f"eq7_stall({_on_link(s, link)})", row, -seconds, np.inf)


def _packed_pages(problem: Problem, gap: Gap, columns: GapColumns) -> Iterator[tuple[Paging, int]]:
    """Yield the columns p of a gap, each with what its round trip costs."""
    packing = problem.tensors[gap.tensor].packing(gap.version)
    for paging in packing.paging if packing is not None else ():
        if paging.target in columns.packed_page:
            yield paging, columns.packed_page[paging.target]


def _on_link(place: int, link: int) -> str:
    """Return the suffix of a row's name for one link at a place; link 0 is omitted."""
    return f"{place},{link}" if link else f"{place}"


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
        for paging, v in _packed_pages(f.problem, f.problem.gaps[g], columns):
            d, nbytes = paging.target, _packed_bytes(f.problem, f.problem.gaps[g])
            columns.packed_read_ahead[d] = f.hiding_column(f"hp({g},{d})", nbytes)
            columns.packed_write_behind[d] = f.hiding_column(f"wp({g},{d})", nbytes)
            f.model.row(
                f"eq7_packed_read_hidden({g},{d})", [(columns.packed_read_ahead[d], 1.0), (v, -1.0)], -np.inf, 0.0
            )
            f.model.row(
                f"eq7_packed_write_hidden({g},{d})", [(columns.packed_write_behind[d], 1.0), (v, -1.0)], -np.inf, 0.0
            )


def add_overlap_loads(f: Columns, gap: Gap, columns: GapColumns, held: HeldBytes) -> None:
    """A transfer that hides behind compute holds its buffer meanwhile."""
    nbytes, packed_bytes = f.problem.tensors[gap.tensor].nbytes, _packed_bytes(f.problem, gap)
    packed = {*columns.packed_read_ahead.values(), *columns.packed_write_behind.values()}
    for column, window, _ in _hidden(f.problem, gap, columns):
        for t, _ in window:
            held.add(column, packed_bytes if column in packed else nbytes, t, t + 1)


def _packed_bytes(problem: Problem, gap: Gap) -> int:
    packing = problem.tensors[gap.tensor].packing(gap.version)
    return 0 if packing is None else packing.packed_bytes


def _hidden(problem: Problem, gap: Gap, columns: GapColumns) -> Iterator[tuple[int, list[tuple[int, float]], int]]:
    """Yield the columns h, w, hp and wp of a gap, each with its link and the (stage, seconds)
    shares that hide its transfer.
    """
    for paging, _ in _packed_pages(problem, gap, columns):
        if paging.target in columns.packed_read_ahead:
            link = problem.link(paging.target)
            yield columns.packed_read_ahead[paging.target], _window(problem, gap, paging.seconds_in, -1), link
            yield columns.packed_write_behind[paging.target], _window(problem, gap, paging.seconds_out, 1), link
    for paging in problem.tensors[gap.tensor].paging:
        if paging.target in columns.read_ahead:
            link = problem.link(paging.target)
            yield columns.read_ahead[paging.target], _window(problem, gap, paging.seconds_in, -1), link
            yield columns.write_behind[paging.target], _window(problem, gap, paging.seconds_out, 1), link


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
    """Hidden transfer seconds of a link within one segment of the step <= its compute
    seconds + stall of the segment.
    """
    problem = f.problem
    bucket_of = np.minimum(
        (np.cumsum([s.seconds for s in problem.stages]) / (problem.base_seconds or 1.0) * BUCKETS).astype(int),
        BUCKETS - 1,
    )
    work: dict[tuple[int, int], list[Term]] = defaultdict(list)
    for g, columns in f.gaps.items():
        for column, window, link in _hidden(problem, problem.gaps[g], columns):
            shares: dict[int, float] = defaultdict(float)
            for t, part in window:
                shares[int(bucket_of[t])] += part
            for b, part in shares.items():
                work[link, b].append((column, -part / f.second_scale))
    again: dict[int, list[Term]] = defaultdict(list)
    for _, s, rematerialization, v in f.rematerialization_columns():
        again[int(bucket_of[s])].append((v, rematerialization.seconds / f.second_scale))
    for s, terms in enumerate(variant_seconds(f)):
        again[int(bucket_of[s])] += terms
    compute = np.zeros(BUCKETS)
    np.add.at(compute, bucket_of, [s.seconds for s in problem.stages])
    for (link, b), terms in sorted(work.items()):
        place = _on_link(b, link)
        f.bucket_stalls[link, b] = f.model.column(f"bucket_stall({place})", upper=np.inf)
        row = [*terms, *again[b], (f.bucket_stalls[link, b], 1.0)]
        f.model.row(f"eq7_bucket_stall({place})", row, -compute[b] / f.second_scale, np.inf)


def eq7_total_stall(f: Columns) -> None:
    """The step's stall covers all transfers of each link that compute does not, exposed ones and
    those too long for a segment.
    """
    problem = f.problem
    stall = f.stalls[-1] = f.model.column("stall", _stall_cost(f), np.inf)
    total: dict[int, list[Term]] = defaultdict(lambda: [(stall, 1.0)])
    exposed: dict[int, list[Term]] = defaultdict(lambda: [(stall, 1.0)])
    for g, columns in f.gaps.items():
        gap = problem.gaps[g]
        for paging in problem.tensors[gap.tensor].paging:
            seconds_in, link = paging.seconds_in / f.second_scale, problem.link(paging.target)
            for (_, target), v in columns.page.items():
                if target == paging.target:
                    total[link].append((v, -seconds_in))
                    exposed[link].append((v, -seconds_in))
        for paging, v in _packed_pages(problem, gap, columns):
            seconds = (paging.seconds_in + paging.seconds_out) / f.second_scale
            total[problem.link(paging.target)].append((v, -seconds))
            exposed[problem.link(paging.target)].append((v, -seconds))
        for column, window, link in _hidden(problem, gap, columns):
            exposed[link].append((column, sum(part for _, part in window) / f.second_scale))
    for (i, _, target), v in f.page_out.items():
        seconds = next(p.seconds_out for p in problem.tensors[i].paging if p.target == target) / f.second_scale
        total[problem.link(target)].append((v, -seconds))
        exposed[problem.link(target)].append((v, -seconds))
    again = [
        (v, rematerialization.seconds / f.second_scale) for _, _, rematerialization, v in f.rematerialization_columns()
    ]
    again += [(v, rematerialization.seconds / f.second_scale) for rematerialization, v in f.source_columns()]
    for g, columns in f.gaps.items():
        packing = problem.tensors[problem.gaps[g].tensor].packing(problem.gaps[g].version)
        if packing is not None:
            again += [(v, packing.seconds / f.second_scale) for v in columns.packing()]
    again += [term for terms in variant_seconds(f) for term in terms]
    for link in sorted({0, *total}):
        row = [*total[link], *again]
        f.model.row(f"eq7_total_stall{_of_link(link)}", row, -problem.base_seconds / f.second_scale, np.inf)
    if not f.breadth.timeless:
        eq7_write_behind(f)
        f.exposed = {link: exposed[link] for link in sorted({0, *exposed})}


def _of_link(link: int) -> str:
    """Return the suffix of the name of a row that exists once per link; "" for link 0."""
    return f"({link})" if link else ""


def eq7_write_behind(f: Columns) -> None:
    """No more is hidden of a write than is written: sum of w over gaps with the same contents <= o."""
    found: dict[tuple[int, int, int], list[Term]] = defaultdict(list)
    for g, columns in f.gaps.items():
        for target, v in columns.write_behind.items():
            found[f.page_out_key(g, target)].append((v, 1.0))
    for key, terms in found.items():
        if key in f.page_out:
            terms.append((f.page_out[key], -1.0))
        f.model.row(f"eq7_write_behind({key[0]},{key[1]},{key[2]})", terms, -np.inf, 0.0)


def eq7_exposed_stall(f: Columns) -> None:
    """stall >= exposed reads and writes of a link + its stalls of the segments."""
    for link, exposed in f.exposed.items():
        tiles = [(v, -1.0) for (other, _), v in f.bucket_stalls.items() if other == link]
        f.model.row(f"eq7_exposed_stall{_of_link(link)}", exposed + tiles, 0.0, np.inf)
