"""Schedules by fixed heuristics: page everything, pack everything, sqrt(n) segments, a chain cut by dynamic
programming, greedy by time.

They are baselines for comparison with the planner, and starting points for its search, which must not be worse.
"""

import itertools
import math
from collections.abc import Iterator

from port_planner.problem.intermediates import prune_intermediates
from port_planner.problem.problem import Choice, GapDecision, Problem, Schedule
from port_planner.problem.replay import page_out_ready, transfers_fit
from port_planner.search.greedy.search import Greedy, GreedySearch
from port_planner.search.greedy.search_steps import SearchStep

MAX_SEGMENT = 96
"""Longest segment, in forward stages, that the dynamic program considers."""


def simple_schedules(problem: Problem) -> Iterator[Schedule]:
    """Yield the schedules of the heuristics, with which a search may start; none of them need be valid."""
    found = by_time(problem).schedule
    if found is not None:
        yield found
    yield page_everything(problem)
    yield sqrt_segments(problem)
    yield from chain_schedules(problem)


def page_everything(problem: Problem) -> Schedule:
    """Return the schedule that pages every gap that is long enough for writing and reading back."""
    choices = []
    for g, gap in enumerate(problem.gaps):
        paging = problem.tensors[gap.tensor].paging
        if gap.dead or not paging or problem.tensors[gap.tensor].pinned:
            continue
        if gap.before >= page_out_ready(problem, gap, None) and transfers_fit(problem, gap, paging[0], gap.before):
            choices.append(Choice(g, gap.before, GapDecision.PAGE, paging[0].target))
    return Schedule(tuple(choices))


def pack_everything(problem: Problem) -> Schedule:
    """Return the schedule that packs every gap that can be packed."""
    packable = (
        g
        for g, gap in enumerate(problem.gaps)
        if not gap.dead and problem.tensors[gap.tensor].packing(gap.version) is not None
    )
    return Schedule(tuple(Choice(g, problem.gaps[g].before, GapDecision.PACK) for g in packable))


def sqrt_segments(problem: Problem) -> Schedule:
    """Return Chen's schedule, sqrt(n) equal segments of the forward pass: boundaries are kept,
    and insides are recomputed.
    """
    turn = _turning_stage(problem)
    count = max(round(math.sqrt(turn)), 1)
    bounds = [round(k * turn / count) for k in range(count + 1)]
    return segment_schedule(problem, list(itertools.pairwise(bounds)), frozenset())


def by_time(problem: Problem) -> Greedy:
    """Return the greedy schedule that counts seconds, not joules."""
    found = _ByTime(problem).run()
    return found if found.schedule is not None else _ByTime(problem, recompute=False).run()


class _ByTime(GreedySearch):
    """Greedy search that counts seconds instead of joules, so that hidden transfers are free."""

    def price(self, step: SearchStep) -> float:
        """Return the seconds that a choice adds to the step."""
        return step.seconds + min(self.steps.exposed_s(step.io_seconds), step.io_seconds)


def _turning_stage(problem: Problem) -> int:
    """Return the stage at which the forward pass ends, where the most bytes of rematerializable tensors are idle."""
    level = [0] * (problem.size + 1)
    for gap in problem.gaps:
        tensor = problem.tensors[gap.tensor]
        if not gap.dead and tensor.birth >= 0 and any(tensor.rematerializations):
            level[gap.after + 1] += tensor.nbytes
            level[gap.before] -= tensor.nbytes
    sums = list(itertools.accumulate(level))
    return max(range(problem.size), key=lambda s: sums[s]) + 1


def segment_schedule(
    problem: Problem,
    segments: list[tuple[int, int]],
    paged: frozenset[int],
    kept: frozenset[int] = frozenset(),
    cheap: frozenset[int] | None = None,
) -> Schedule:
    """Return the schedule in which each segment's inner tensors are restored together, when
    the first of them is needed.

    Tensors that a later segment reads are boundaries: they are kept, or paged if their segment is in `paged`. Segments
    in `kept` are not recomputed. In the others, only the tensors in `cheap` are recomputed, if it is given. The replay
    reports a rematerialization without an input.
    """
    turn, tensors = segments[-1][1], problem.tensors
    choices: list[Choice] = []
    wanted: set[tuple[int, int]] = set()
    crossing = [
        (tensors[gap.tensor].birth, g)
        for g, gap in enumerate(problem.gaps)
        if gap.before >= turn > gap.after
        and not gap.dead
        and not tensors[gap.tensor].pinned
        and (cheap is None or gap.tensor in cheap)
    ]
    made_again = [(tensor.birth, i) for i, tensor in enumerate(tensors) if any(tensor.rematerializations)]
    for k, (start, stop) in enumerate(segments):
        if k in kept:
            continue
        inner = [g for birth, g in crossing if start <= birth < stop]
        if not inner:
            continue
        boundary = {g for g in inner if problem.gaps[g].after >= stop or not _rematerializable(problem, g)}
        back = min(problem.gaps[g].before for g in inner)
        for g in inner:
            gap = problem.gaps[g]
            if g in boundary:
                if k in paged and problem.tensors[gap.tensor].paging:
                    choices.append(Choice(g, min(back, gap.before), GapDecision.PAGE))
            else:
                choices.append(Choice(g, min(back, gap.before), GapDecision.RECOMPUTE))
        wanted |= {(i, back) for birth, i in made_again if birth < stop}
    return prune_intermediates(problem, tuple(sorted(choices, key=lambda c: c.gap)), wanted)


SEGMENT_COUNTS = (2, 4, 6, 8, 12, 16, 24, 32, 48)
CHEAP_QUANTILES = (0.2, 0.35, 0.5, 0.65, 0.8)


def cheap_segments(problem: Problem) -> Iterator[Schedule]:
    """Yield segmentations in which only tensors are dropped that are cheap to restore for their size.

    A residual network keeps its convolutions' outputs, and rematerializes norms, activations and sums from them.
    Several thresholds of what is cheap, and several numbers of segments, are tried.
    """
    turn = _turning_stage(problem)
    prices = _rematerialization_prices(problem)
    last = -1
    for quantile in CHEAP_QUANTILES:
        limit = _weighted_quantile(problem, prices, quantile)
        cheap = frozenset(i for i, price in prices.items() if price <= limit)
        if len(cheap) == last:
            continue
        last = len(cheap)
        births = sorted((problem.tensors[i].birth, problem.tensors[i].nbytes) for i in cheap)
        total = sum(nbytes for _, nbytes in births)
        for count in SEGMENT_COUNTS:
            bounds, filled = [0], 0
            for birth, nbytes in births:
                if filled >= total * len(bounds) / count and bounds[-1] < birth < turn:
                    bounds.append(birth)
                filled += nbytes
            yield segment_schedule(problem, list(itertools.pairwise([*bounds, turn])), frozenset(), cheap=cheap)


def _rematerialization_prices(problem: Problem) -> dict[int, float]:
    """Return joules per byte of each tensor that a rematerialization can restore, including
    inputs without later use.
    """
    lasting = {gap.tensor for gap in problem.gaps if not gap.dead and not problem.tensors[gap.tensor].pinned}
    joules: dict[int, float] = {}
    for i in sorted(range(len(problem.tensors)), key=lambda i: problem.tensors[i].birth):
        rematerialization = next((r for r in problem.tensors[i].rematerializations if r is not None), None)
        if rematerialization is not None:
            joules[i] = rematerialization.joules + sum(
                joules.get(u, 0.0) for u, _ in rematerialization.inputs if u not in lasting
            )
    return {i: joules[i] / problem.tensors[i].nbytes for i in joules if i in lasting and problem.tensors[i].nbytes}


def _weighted_quantile(problem: Problem, prices: dict[int, float], share: float) -> float:
    """Return the price below which this `share` of the bytes of all these tensors lies."""
    left = share * sum(problem.tensors[i].nbytes for i in prices)
    for i in sorted(prices, key=lambda i: prices[i]):
        left -= problem.tensors[i].nbytes
        if left <= 0:
            return prices[i]
    return math.inf


def _rematerializable(problem: Problem, g: int) -> bool:
    gap = problem.gaps[g]
    return problem.tensors[gap.tensor].rematerialization(gap.version) is not None


def chain_schedules(problem: Problem) -> Iterator[Schedule]:
    """Yield schedules of the dynamic program, from cheap and large to expensive and small."""
    turn = _turning_stage(problem)
    chain = _Chain(problem, turn)
    total = sum(chain.inside)
    seen = set()
    for price in (0.0, 0.02, 0.1, 0.5, 2.0, 10.0):
        for cap in (total / 4, total / 8, total / 16, total / 32):
            segments, kept, paged = chain.cut(price * chain.unit, cap)
            key = (tuple(segments), kept, paged)
            if key in seen:
                continue
            seen.add(key)
            yield segment_schedule(problem, segments, paged, kept)


class _Chain:
    """The forward pass as a chain of stages, for a dynamic program that decides where to cut it."""

    def __init__(self, problem: Problem, turn: int) -> None:
        self.turn = turn
        self.cost = [problem.stages[s].joules for s in range(turn)]
        self.inside = [0.0] * turn
        """Bytes that are created at a stage and needed after the turning stage."""
        crossing = [0.0] * (turn + 1)
        self.page = [0.0] * turn
        for tensor in problem.tensors:
            birth = tensor.birth
            late = [a for a in tensor.accesses if a >= turn]
            if 0 <= birth < turn and late:
                self.inside[birth] += tensor.nbytes
                last = max((a for a in tensor.accesses if a < turn), default=birth)
                for s in range(birth + 1, last + 1):
                    crossing[s] += tensor.nbytes
                if tensor.paging:
                    self.page[birth] += tensor.paging[0].joules_in + tensor.paging[0].joules_out
        self.crossing = crossing
        self.unit = sum(self.cost) / (sum(self.inside) or 1.0)

    def cut(self, price: float, cap: float) -> tuple[list[tuple[int, int]], frozenset[int], frozenset[int]]:
        """Return segments of at most `cap` inner bytes, those that are kept whole, and
        those whose boundary is paged.
        """
        best: list[tuple[float, int, str]] = [(0.0, 0, "")] + [(math.inf, 0, "")] * self.turn
        for stop in range(1, self.turn + 1):
            nbytes = joules = 0.0
            crossing = self.crossing[min(stop, self.turn - 1)]
            edge, paged_edge = price * crossing, 0.1 * price * crossing
            for start in range(stop - 1, max(stop - MAX_SEGMENT, 0) - 1, -1):
                nbytes += self.inside[start]
                joules += self.cost[start]
                if nbytes > cap and start < stop - 1:
                    break
                kind, extra = "keep", price * nbytes
                if joules + edge < extra:
                    kind, extra = "rematerialization", joules + edge
                if (paged := joules + self.page[stop - 1] + paged_edge) < extra:
                    kind, extra = "page", paged
                if best[start][0] + extra < best[stop][0]:
                    best[stop] = (best[start][0] + extra, start, kind)
        segments, kinds = [], []
        stop = self.turn
        while stop > 0:
            _, start, kind = best[stop]
            segments.append((start, stop))
            kinds.append(kind)
            stop = start
        segments.reverse()
        kinds.reverse()
        kept = frozenset(k for k, kind in enumerate(kinds) if kind == "keep")
        return segments, kept, frozenset(k for k, kind in enumerate(kinds) if kind == "page")
