"""The anytime ladder: greedy, narrow models, the LP bound of the full model, the full model
with expensive columns fixed.

Every rung is judged by the replay, never by the solver's own result; the best valid schedule so far is kept.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from port_planner.milp.columns import Breadth
from port_planner.milp.conflict import shortfalls
from port_planner.milp.highs import HighsSession, Progress, SolverRun, SolverStatus, Vector
from port_planner.milp.milp_model import Formulation
from port_planner.milp.telescoped import run_relaxed
from port_planner.problem.problem import Problem, Schedule, Semantics
from port_planner.problem.replay import replay
from port_planner.search import clock
from port_planner.search.greedy.search import EMPHASES, Greedy, greedy, greedy_variants
from port_planner.search.heuristics import cheap_segments, simple_schedules
from port_planner.search.incumbent import OPTIMAL_GAP, Climb, GainRate, Judge
from port_planner.search.neighbourhood import neighbourhood_search

FULL_MODEL_COLUMNS = 400_000
"""Number of columns above which not even the LP of the full model is worth its time."""

RUNGS = ((Breadth(8, 2, early_pages=False), 0.004, 0.3), (Breadth(12, 2, early_pages=False), 0.03, 0.3))
"""Breadth, share of the LP's value and share of the time of each rung; with these, almost all of POET's
networks reach their optimum.
"""

BUILD_SHARE = 0.5
"""The full model is skipped if building it alone is expected to take more than this share of the remaining time."""

EXACT_STAGES = 30
"""Number of stages up to which rematerializations within a stage are modelled one by one.

Larger ones hold a stage's intermediates together, which costs at most 1.75 % where it was measured.
"""

LARGE_STAGES = 1500
LARGE_RUNGS = ((Breadth(6, 2, early_pages=False), 0.004, 0.8),)
"""Rungs used instead of RUNGS if there are more stages, because the LP of a wider window alone takes too long."""

LARGE_GAP = 2e-3
"""Gap to its own optimum that such a search must reach, because adopting the LP's decisions costs more than that."""

LARGE_ENOUGH = 0.005
"""Gap of a large problem below which its neighbourhoods are not searched, because loading the
model for them takes seconds.
"""

LARGE_GAPS = 1000
"""Number of gaps of a captured step above which it is searched with a narrow window, because building
the model also takes time.
"""

MIN_GAIN = 2e-3
"""Share of a captured step's costs, which scatter by far more; a search that gains less over many attempts ends."""

FRUITLESS_HEURISTICS = 12
"""Number of attempts over which a search must gain `MIN_GAIN`."""

SEARCH_COLUMNS = 20_000
"""Number of free integral columns above which a model is searched window by window."""


def climb(
    problem: Problem,
    time_limit_s: float,
    progress: Progress | None = None,
    judge: Judge = replay,
    *,
    paging: bool = True,
    recompute: bool = True,
    first: Greedy | None = None,
    bounded: Problem | None = None,
) -> Climb:
    """Return the best schedule and bound that are found for `problem` within `time_limit_s` of CPU time.

    `first`: the greedy search's result for it, if known. `bounded`: the same problem with wider limits, if the
    bound must hold for these.
    """
    deadline = clock.now() + time_limit_s
    state = Climb(problem, deadline, progress, judge=judge, paging=paging, recompute=recompute)
    state.greedy = first or greedy(problem, paging=paging, recompute=recompute)
    if state.greedy.schedule is not None:
        state.offer(state.greedy.schedule, "greedy")
    if state.schedule is None:
        offer_without_limits(state)
    if state.proven:
        return state
    small_bound(state, bounded or problem)
    if problem.semantics is Semantics.ELASTIC:
        _climb_captured(state, time_limit_s)
    else:
        _climb_abstract(state, time_limit_s)
    return state


def offer_without_limits(state: Climb) -> None:
    """Offer the result of greedy search with unlimited time and writes.

    Greedy search overestimates both, and the judge may find that the limits are kept.
    """
    problem = state.problem
    free = replace(problem, deadline_s=None, write_limit_bytes=None)
    if free == problem:
        return
    for packing in (True, False):
        found = greedy(free, paging=state.paging, recompute=state.recompute, packing=packing).schedule
        if found is not None:
            state.offer(found, "greedy without limits")


def _climb_abstract(state: Climb, total: float) -> None:
    large = state.problem.size > LARGE_STAGES
    for breadth, share, part in LARGE_RUNGS if large else RUNGS:
        if not state.proven and not state.infeasible and state.left > 0.1 * total:
            guided(state, breadth, share, part * total, fix_ones=large)
    if not state.proven and not state.infeasible and state.left > 0.25 * total and not large:
        full_model(state, total)
    near = large and state.cost - state.bound < LARGE_ENOUGH * state.cost
    if not state.proven and not state.infeasible and not near and state.left > 0.1 * total:
        search_windows(state, RUNGS[0][0], state.left)


def _climb_captured(state: Climb, total: float) -> None:
    """Search a captured step in neighbourhoods, because transfers that stall make its LP weak.

    A model of the whole is used only if nothing else solved it.
    """
    narrow = captured_breadth(state.problem)
    if state.paging and state.recompute:
        offer_heuristics(state, 0.3 * total)
    if state.schedule is None:
        guided(state, replace(narrow, timeless=True), 0.02, 0.4 * total)
    if not state.proven and state.schedule is not None:
        search_windows(state, narrow, state.left, MIN_GAIN)


def captured_breadth(problem: Problem) -> Breadth:
    """Return the breadth at which the neighbourhoods of a captured step are searched."""
    return Breadth(3, 1, early_pages=False) if len(problem.gaps) > LARGE_GAPS else Breadth(8, 2, early_pages=False)


def offer_heuristics(state: Climb, seconds: float) -> None:
    """Offer heuristics and variants of the greedy search, for `seconds` of CPU time or until they gain almost nothing.

    Baselines are among the heuristics. Variants gain most from an existing schedule; without one, heuristics run first.
    """
    stop_at, rate = state.left - seconds, GainRate(state, MIN_GAIN)
    variants = ((variant, "variant") for variant in greedy_variants(state.problem, cheap_segments(state.problem)))
    first = [] if state.schedule is None else itertools.islice(variants, len(EMPHASES))
    for schedule, rung in itertools.chain(first, _heuristics(state.problem), variants):
        if schedule is not None:
            state.offer(schedule, rung)
        if (state.schedule is not None or rung == "variant") and (
            state.left < stop_at or rate.is_too_low(FRUITLESS_HEURISTICS)
        ):
            return


def _heuristics(problem: Problem) -> Iterator[tuple[Schedule | None, str]]:
    """Yield the results of the greedy search without one of its means, and simple schedules;
    None if there is no result.
    """
    for partial in ({"packing": False}, {"recompute": False}, {"paging": False}):
        yield greedy(problem, **partial).schedule, "greedy without " + next(iter(partial))
    yield from ((schedule, "simple") for schedule in simple_schedules(problem))


def _formulation(state: Climb, breadth: Breadth) -> Formulation:
    """Return the model of this breadth; it also offers the decisions of the best schedule."""
    allowed = replace(breadth, paging=state.paging, recompute=state.recompute)
    begin = clock.now()
    made = Formulation(state.problem, allowed, state.schedule)
    state.seconds_per_return = (clock.now() - begin) / max(_returns(state.problem, breadth), 1)
    return made


def _returns(problem: Problem, breadth: Breadth) -> int:
    """Return how many return stages a model of this breadth offers; the time to build it grows with this number."""
    lengths = (gap.before - gap.after for gap in problem.gaps if not gap.dead)
    return sum(length if breadth.window is None else min(length, breadth.window + 1) for length in lengths)


def search_windows(state: Climb, breadth: Breadth, seconds: float, min_gain: float = 0.0) -> None:
    """Improve the best schedule neighbourhood by neighbourhood."""
    neighbourhood_search(state, _formulation(state, breadth), seconds, min_gain)


SMALLEST = Breadth(0, 0, early_pages=False, inputs=False, sources=True, timeless=True, optimistic=True)
"""The smallest relaxation.

Tensors come back at the ends of their gaps, rematerializations find their inputs somewhere in theirs, and each transfer
takes its time as a whole.
"""


def small_bound(state: Climb, problem: Problem) -> None:
    """Raise the bound with the smallest relaxation of `problem`, which contains all
    schedules of the searched problem.
    """
    formulation = Formulation(problem, replace(SMALLEST, paging=state.paging, recompute=state.recompute))
    seconds = max(0.2 * state.left, 2.0)
    relaxed = run_relaxed(formulation.model, state.wall(min(seconds, state.left)))
    if relaxed.status is SolverStatus.INFEASIBLE:
        _note_infeasible(state, formulation)
    elif relaxed.status is SolverStatus.OPTIMAL:
        state.raise_bound(relaxed.bound * formulation.joule_scale)


def relaxation_bound(problem: Problem, time_limit_s: float) -> float | None:
    """Return the smallest relaxation's bound on the overhead joules of `problem`; None if time was too short."""
    formulation = Formulation(problem, SMALLEST)
    run = run_relaxed(formulation.model, clock.solver_seconds(time_limit_s))
    return run.bound * formulation.joule_scale if run.status is SolverStatus.OPTIMAL else None


def _note_infeasible(state: Climb, formulation: Formulation) -> None:
    """Record that no schedule exists, and which limits prevent one."""
    if state.schedule is None:
        state.infeasible = True
        state.missed = shortfalls(formulation, state.wall(max(state.left, 1.0)))


def guided(state: Climb, breadth: Breadth, share: float, seconds: float, *, fix_ones: bool = False) -> None:
    """Search the model of one breadth among the columns that its LP finds promising.

    Promising: reduced cost within `share` of the LP's value. With `fix_ones`, columns that the LP sets to one are
    fixed. Nothing is proved here; the aim is to find a good schedule soon.
    """
    begin = clock.now()
    formulation = _formulation(state, breadth)
    if formulation.model.impossible:
        return
    relaxed = run_relaxed(formulation.model, state.wall(min(seconds, state.left)))
    if relaxed.status is not SolverStatus.OPTIMAL:
        return
    lowest = relaxed.bound * formulation.joule_scale
    slack = min(max(share * lowest, 0.1 * share * (state.cost - lowest)), state.cost - lowest)
    fixed, value = (
        (certain_columns(formulation, relaxed), 1.0)
        if fix_ones
        else (expensive_columns(formulation, relaxed, slack), 0.0)
    )
    session = HighsSession(formulation.model)
    session.bound_columns(fixed, np.full(len(fixed), value), np.full(len(fixed), value))
    free = sum(formulation.model.integral) - len(fixed)
    left = seconds - (clock.now() - begin)
    gap = LARGE_GAP if fix_ones else OPTIMAL_GAP
    rung = f"window {breadth.window}, {free} columns"
    search(state, formulation, session, min(left, state.left), gap, rung, start=not fix_ones)


def search(
    state: Climb,
    formulation: Formulation,
    session: HighsSession,
    seconds: float,
    gap: float,
    rung: str,
    *,
    start: bool = True,
) -> SolverRun | None:
    """Run the solver on a loaded model, beginning with the best schedule if `start`, and offer
    the schedules that it finds.
    """
    if seconds <= 0.05:
        return None
    known = formulation.start_values(state.schedule) if start and state.schedule is not None else None
    if known is not None:
        session.start_from(known)
    progress, nodes = scaled_progress(state, formulation), clock.solver_nodes()
    run = session.run(state.wall(seconds), gap=gap, progress=progress, node_limit=nodes)
    if run.values is not None:
        state.offer(formulation.schedule(run.values), rung)
    return run


def scaled_progress(state: Climb, formulation: Formulation) -> Progress | None:
    """Return a callback that converts the solver's units to joules and never reports worse than the best known."""
    if state.progress is None:
        return None
    watch, scale = state.progress, formulation.joule_scale

    def forward(incumbent: float, _: float) -> None:
        watch(min(incumbent * scale, state.cost), state.bound)

    return forward


def full_model(state: Climb, total: float) -> None:
    """Bound the full model by its LP, then search it among the columns that the LP does not rule out.

    A column whose reduced cost exceeds the slack is in no schedule that is cheaper than bound plus slack. So
    the search starts with little slack and few columns, and widens until the best schedule is within the slack,
    which makes it the optimum.
    """
    breadth = Breadth(exact_stages=state.problem.size <= EXACT_STAGES)
    if state.seconds_per_return * _returns(state.problem, breadth) > BUILD_SHARE * state.left:
        return
    formulation = _formulation(state, breadth)
    if formulation.model.columns > FULL_MODEL_COLUMNS:
        return
    relaxed = run_relaxed(formulation.model, state.wall(min(0.6 * total, state.left)))
    if relaxed.status is SolverStatus.INFEASIBLE:
        _note_infeasible(state, formulation)
        return
    lowest = relaxed.bound * formulation.joule_scale
    state.raise_bound(lowest)
    if relaxed.reduced_costs is None:
        return
    if not state.proven and state.left > 0.02 * total:
        search_slack(state, formulation, relaxed, state.cost - lowest)


def search_slack(state: Climb, formulation: Formulation, relaxed: SolverRun, slack: float) -> None:
    """Search the full model among the columns within `limit_bytes` joules of the LP bound."""
    model, lowest = formulation.model, relaxed.bound * formulation.joule_scale
    fixed = expensive_columns(formulation, relaxed, slack)
    free = sum(model.integral) - len(fixed)
    if free > SEARCH_COLUMNS:
        return
    session = HighsSession(model)
    session.bound_columns(fixed, np.zeros(len(fixed)), np.zeros(len(fixed)))
    run = search(state, formulation, session, state.left, OPTIMAL_GAP, f"full, {free} columns")
    if run is not None and run.status is SolverStatus.INFEASIBLE:
        state.infeasible = not math.isfinite(slack)
        state.raise_bound(min(lowest + slack, state.cost))
    elif run is not None:
        state.raise_bound(min(run.bound * formulation.joule_scale, lowest + slack, state.cost))


def certain_columns(formulation: Formulation, relaxed: SolverRun) -> list[int]:
    """Return the integral columns that the LP sets to one."""
    if relaxed.values is None:
        return []
    return [
        int(c) for c in np.flatnonzero(np.array(formulation.model.integral, dtype=bool) & (relaxed.values > 1 - 1e-6))
    ]


def expensive_columns(formulation: Formulation, relaxed: SolverRun, slack: float) -> list[int]:
    """Return the columns that no schedule cheaper than the LP bound plus `limit_bytes` joules uses."""
    if relaxed.reduced_costs is None or not math.isfinite(slack):
        return []
    limit = slack / formulation.joule_scale * (1 + 1e-6) + 1e-9
    integral = np.array(formulation.model.integral, dtype=bool)
    values: Vector = relaxed.values if relaxed.values is not None else np.zeros(len(integral))
    expensive = integral & (relaxed.reduced_costs > limit) & (values < 1e-6)
    return [int(c) for c in np.flatnonzero(expensive)]
