"""For bounds: a rematerialization needs its inputs at some stage of its gap (eq3_sources).

A bound may not state when in its gap a tensor is rematerialized. But each input is there at that moment: it is
used in between, kept through its own gap, or back from then on (which takes memory until that gap ends).
Otherwise it is rematerialized itself, for joules and with inputs of its own. This is what remains of `eq3_inputs`
if return stages are not modelled.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from port_planner.milp.columns import Columns, Term
from port_planner.problem.problem import Rematerialization

MAX_POINTS = 4
"""Stages of a gap from which it may be back early: more of them enlarge the relaxation and hardly raise it."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Stages `first` to `last`, both included, at the start of one of which something is rematerialized."""

    first: int
    last: int

    def hull(self, other: "_Span") -> "_Span":
        return _Span(min(self.first, other.first), max(self.last, other.last))


@dataclass(frozen=True, slots=True)
class _Idle:
    """A gap of an input that overlaps a span: stages of the span in it, and the last of them
    on the gap's own time line.
    """

    gap: int
    span: _Span
    unrolled: int


@dataclass(slots=True)
class _RematInput:
    """An input that is available for a rematerialization unless it is idle in one of these gaps."""

    tensor: int
    idle: list[_Idle]


def eq3_sources(f: Columns) -> None:
    """Add `x[g] or m[i,h] <= sum of a[h,s] and m[u,h]` over the gaps h of each input u in which it may be found. s is
    the last stage of g in h.
    """
    needs: dict[int, list[_RematInput]] = {}
    spans, waiting = dict[int, _Span](), list[int]()
    for g, columns in f.gaps.items():
        gap = f.problem.gaps[g]
        how = f.rematerialization_of(gap) if columns.recompute else None
        if how is not None:
            found = needs[columns.recompute[gap.before]] = _needs(f, how, _Span(gap.after + 1, gap.before))
            _widen(found, spans, waiting)
    while waiting:
        h = waiting.pop()
        how = f.rematerialization_of(f.problem.gaps[h])
        if how is not None:
            _widen(_needs(f, how, spans[h]), spans, waiting)
    for h, span in spans.items():
        gap = f.problem.gaps[h]
        how = f.rematerialization_of(gap)
        if how is not None:
            f.sources[h] = f.model.column(f"m({gap.tensor},{h})", f.rematerialization_joules(how), np.inf)
            needs[f.sources[h]] = _needs(f, how, span)
    back = _define_presence(f, [idle for found in needs.values() for need in found for idle in need.idle])
    for column, found in needs.items():
        for need in found:
            terms: list[Term] = [(column, 1.0)]
            for idle in need.idle:
                there = (f.sources.get(idle.gap), back.get((idle.gap, idle.unrolled)))
                terms += [(v, -1.0) for v in there if v is not None]
            f.model.row(f"eq3_sources({f.model.names[column]},{need.tensor})", terms, -np.inf, 0.0)


def _widen(needs: list[_RematInput], spans: dict[int, _Span], waiting: list[int]) -> None:
    """Record the stages in which tensors may be needed as intermediates, and the tensors to be examined (again)."""
    for idle in (idle for need in needs for idle in need.idle):
        known = spans.get(idle.gap)
        wider = idle.span if known is None else known.hull(idle.span)
        if wider != known:
            spans[idle.gap] = wider
            waiting.append(idle.gap)


def _needs(f: Columns, how: Rematerialization, span: _Span) -> list[_RematInput]:
    """Return the inputs that may be missing in at least one stage of a span."""
    found = ((u, _idle(f, u, version, span)) for u, version in how.inputs)
    return [_RematInput(u, idle) for u, idle in found if idle is not None]


def _idle(f: Columns, tensor: int, version: int, span: _Span) -> list[_Idle] | None:
    """Return the gaps in which a version of a tensor is idle during a span.

    None if it is there at one of the span's stages whatever is decided.
    """
    problem, info = f.problem, f.problem.tensors[tensor]
    used = info.accesses[bisect_left(info.accesses, span.first) : bisect_right(info.accesses, span.last)]
    if any(s != info.birth and problem.found_versions[tensor][s] == version for s in used):
        return None
    found = []
    for h in problem.gaps_of[tensor]:
        gap = problem.gaps[h]
        for shift in (0, problem.size):
            first, last = max(span.first + shift, gap.after + 1), min(span.last + shift, gap.before - 1)
            if gap.version != version or first > last:
                continue
            if not gap.dead and h not in f.gaps:
                return None
            found.append(_Idle(h, _Span(first - shift, last - shift), last))
    return found


def _define_presence(f: Columns, idle: list[_Idle]) -> dict[tuple[int, int], int]:
    """Create a[h,s]: back from a stage s on at which a rematerialization may read it, k <= a[h,s] <=
    a[h,s'] <= k + x + sum of y.

    Return by gap and stage the column that says whether it is back there or, if there are many stages, a little later.
    """
    found: dict[tuple[int, int], int] = {}
    points: dict[int, set[int]] = defaultdict(set)
    for one in idle:
        if one.gap in f.gaps:
            points[one.gap].add(one.unrolled)
    for h, stages in points.items():
        columns, before, ordered = f.gaps[h], f.problem.gaps[h].before, sorted(stages)
        count = min(len(ordered), MAX_POINTS)
        chosen = [ordered[len(ordered) * (k + 1) // count - 1] for k in range(count)]
        previous = columns.keep
        for s, end in itertools.pairwise([*chosen, before]):
            present = f.model.column(f"a({h},{s})")
            f.model.row(f"eq2_presence({h},{s})", [(present, 1.0), (previous, -1.0)], 0.0, np.inf)
            columns.presence.update(dict.fromkeys(range(s, end), present))
            previous = present
        back = [(v, -1.0) for v in (columns.keep, *columns.recompute.values(), *columns.page.values())]
        f.model.row(f"eq2_presence({h},{before})", [(previous, 1.0), *back], -np.inf, 0.0)
        found |= {(h, t): columns.presence[chosen[bisect_left(chosen, t)]] for t in ordered}
    return found
