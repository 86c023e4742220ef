"""Published methods as planning strategies, behind the same interface and judged in the same way, for comparison.

- keep-all and page-all;
- Chen's sqrt(n) checkpointing (arXiv 1604.06174);
- Checkmate, optimal recomputation (arXiv 1910.02653);
- Capuchin-like greedy swap or recompute by time (ASPLOS 2020);
- POFO-like segments of a chain chosen by dynamic programming, boundaries kept or offloaded (NeurIPS 2021);
- BitTrain, every idle tensor packed without loss (arXiv 2110.15362);
- POET's optimum under its own semantics (ICML 2022), judged by the real one.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from port_planner.problem.problem import Problem, Schedule, Semantics
from port_planner.search import clock
from port_planner.search.anytime import climb
from port_planner.search.heuristics import by_time, chain_schedules, pack_everything, page_everything, sqrt_segments
from port_planner.search.incumbent import Climb, Judge

Baseline = Callable[[Problem, float, Judge], Climb]


def keep_all(problem: Problem, time_limit_s: float, judge: Judge) -> Climb:
    """Offer the schedule that does nothing."""
    return _first_valid(problem, time_limit_s, judge, [Schedule()], "keep-all")


def page_all(problem: Problem, time_limit_s: float, judge: Judge) -> Climb:
    """Offer the schedule that pages every gap that is long enough for writing and reading back."""
    return _first_valid(problem, time_limit_s, judge, [page_everything(problem)], "page-all")


def chen(problem: Problem, time_limit_s: float, judge: Judge) -> Climb:
    """Offer sqrt(n) equal segments of the forward pass: boundaries are kept, and insides are
    recomputed segment by segment.
    """
    return _first_valid(problem, time_limit_s, judge, [sqrt_segments(problem)], "chen")


def pofo(problem: Problem, time_limit_s: float, judge: Judge) -> Climb:
    """Offer the segmentations that a dynamic program finds for several prices of memory and segment sizes."""
    return _first_valid(problem, time_limit_s, judge, chain_schedules(problem), "pofo")


def checkmate(problem: Problem, time_limit_s: float, judge: Judge) -> Climb:
    """Find the optimal recomputation, without paging."""
    return climb(problem, time_limit_s, None, judge, paging=False)


def capuchin(problem: Problem, time_limit_s: float, judge: Judge) -> Climb:
    """Swap tensors whose transfers hide behind compute, then recompute or swap those that
    cost the least time per byte.
    """
    state = _state(problem, time_limit_s, judge)
    found = by_time(problem)
    state.greedy = found
    if found.schedule is not None:
        state.offer(found.schedule, "capuchin")
    return state


def bittrain(problem: Problem, time_limit_s: float, judge: Judge) -> Climb:
    """Offer the schedule that packs every gap of tensors that are sparse, boolean or have few different integers."""
    return _first_valid(problem, time_limit_s, judge, [pack_everything(problem)], BITTRAIN)


def poet(problem: Problem, time_limit_s: float, judge: Judge) -> Climb:
    """Find POET's optimum, for which transfers take no time, and judge it by this problem's own semantics."""
    own = climb(replace(problem, semantics=Semantics.POET), time_limit_s)
    state = _state(problem, time_limit_s, judge)
    if own.schedule is not None:
        state.offer(own.schedule, "poet")
    return state


BITTRAIN = "bittrain"

BASELINES: dict[str, Baseline] = {
    "keep-all": keep_all,
    "page-all": page_all,
    "chen": chen,
    "checkmate": checkmate,
    "capuchin": capuchin,
    "pofo": pofo,
    "poet": poet,
    BITTRAIN: bittrain,
}


def _state(problem: Problem, time_limit_s: float, judge: Judge) -> Climb:
    return Climb(problem, clock.now() + time_limit_s, judge=judge)


def _first_valid(
    problem: Problem, time_limit_s: float, judge: Judge, schedules: Iterable[Schedule], name: str
) -> Climb:
    """Return a state with the cheapest valid schedule among those that can be judged in time."""
    state = _state(problem, time_limit_s, judge)
    for schedule in schedules:
        state.offer(schedule, name)
        if state.left <= 0:
            break
    return state
