"""Solve an abstract problem: a schedule, with a bound, a gap and a plain statement of the outcome."""

import enum
from dataclasses import dataclass, replace

from port_planner.base.errors import ExitCode, PortError
from port_planner.milp.conflict import Shortfall
from port_planner.milp.highs import Progress
from port_planner.problem.problem import Problem, Schedule
from port_planner.problem.replay import ScheduleCost, replay
from port_planner.search import clock
from port_planner.search.anytime import climb
from port_planner.search.baselines import BASELINES, BITTRAIN
from port_planner.search.greedy.search import Greedy, greedy
from port_planner.search.incumbent import Climb, Judge

NAMED_ROWS = 3
"""Largest number of rows missed by an infeasible model that are named."""

STRATEGIES = ("milp", "greedy", *BASELINES)


class Outcome(enum.Enum):
    """How planning ended; the value is the message for the user."""

    OPTIMAL = "proven optimal for this order of operators"
    FEASIBLE = "within its budgets; a longer --time-limit may find a cheaper plan"
    INFEASIBLE = "no plan fits these budgets; raise --ram or the deadline, or use a smaller batch"
    TIMED_OUT = "the time limit passed before any plan was found; raise --time-limit or --ram"


class StrategyError(PortError):
    """An unknown planning strategy."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class Solution:
    """The result of solving an abstract problem.

    `overhead_joules`: energy beyond running every stage once, static power while waiting for transfers
    included. `bound_joules`: a proven lower bound on the overhead of every schedule of this class.
    `log`: the result of each rung.
    """

    outcome: Outcome
    schedule: Schedule | None
    evaluation: ScheduleCost | None
    overhead_joules: float | None
    bound_joules: float | None
    seconds: float
    needed_bytes: int | None = None
    needed_stage: int | None = None
    strategy: str = "greedy"
    log: tuple[str, ...] = ()
    missed: tuple[Shortfall, ...] = ()
    """Limits that the planning model misses if it is itself infeasible, the worst first."""

    @property
    def message(self) -> str:
        """The outcome in words: what happened, with which numbers, and what to do."""
        if self.schedule is None and self.needed_bytes is not None and self.outcome is Outcome.INFEASIBLE:
            return (
                f"{self.outcome.value}; the fullest stage ({self.needed_stage}) needs {self.needed_bytes} B "
                f"when everything else is paged out{self.missed_rows}"
            )
        return self.outcome.value

    @property
    def missed_rows(self) -> str:
        """The rows that cannot be satisfied, by their names in FORMULATION.md; empty if none can be named."""
        if not self.missed:
            return ""
        rest = f" and {len(self.missed) - NAMED_ROWS} more" if len(self.missed) > NAMED_ROWS else ""
        return f"; the model misses {', '.join(map(str, self.missed[:NAMED_ROWS]))}{rest}"

    @property
    def gap(self) -> float | None:
        """Relative distance between overhead and bound; None while either is unknown."""
        return relative_gap(self.overhead_joules, self.bound_joules)


def relative_gap(value: float | None, bound: float | None) -> float | None:
    """Return (value - bound) / value; 0 if both are 0, None if either is unknown."""
    if value is None or bound is None:
        return None
    return max(value - bound, 0.0) / abs(value) if abs(value) > 1e-15 else 0.0


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 20.0,
    strategy: str = "milp",
    progress: Progress | None = None,
    judge: Judge = replay,
    first: Greedy | None = None,
    unpacked_known: bool = False,
    bounded: Problem | None = None,
) -> Solution:
    """Return the best schedule that `strategy` finds for `problem` within `time_limit_s` of CPU time.

    `first`: the greedy search's result, if known. `unpacked_known`: the caller has the greedy search's result
    without packing. `bounded`: the problem that the bound must hold for, if it has wider limits. Raises
    StrategyError for an unknown strategy.
    """
    begin = clock.now()
    if strategy == "milp":
        state = climb(problem, time_limit_s, progress, judge, first=first, bounded=bounded)
    elif strategy == "greedy":
        state = _greedy_climb(problem, time_limit_s, progress, judge, first, unpacked_known=unpacked_known)
    elif strategy in BASELINES:
        state = BASELINES[strategy](_without_packing(problem, strategy), time_limit_s, judge)
    else:
        raise StrategyError(f"unknown planning strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    return _solution(state, begin, strategy)


def _without_packing(problem: Problem, strategy: str) -> Problem:
    """Return the problem without the possibilities that other methods lack; BitTrain has only packing."""
    if strategy == BITTRAIN:
        return problem
    return replace(problem, tensors=tuple(replace(tensor, packings=()) for tensor in problem.tensors))


def _greedy_climb(
    problem: Problem,
    time_limit_s: float,
    progress: Progress | None,
    judge: Judge,
    first: Greedy | None,
    *,
    unpacked_known: bool,
) -> Climb:
    state = Climb(problem, clock.now() + time_limit_s, progress, judge=judge)
    state.greedy = first or greedy(problem)
    if state.greedy.schedule is not None:
        state.offer(state.greedy.schedule, "greedy")
    if not unpacked_known and any(tensor.packings for tensor in problem.tensors):
        without = greedy(problem, packing=False).schedule
        if without is not None:
            state.offer(without, "greedy without packing")
    return state


def _solution(state: Climb, begin: float, strategy: str) -> Solution:
    seconds = clock.now() - begin
    needed = state.greedy.needed_bytes if state.greedy is not None else None
    stage = state.greedy.stage if state.greedy is not None else None
    if state.schedule is None:
        ended = Outcome.INFEASIBLE if state.infeasible or state.left > 0 else Outcome.TIMED_OUT
        return Solution(ended, None, None, None, None, seconds, needed, stage, strategy, tuple(state.log), state.missed)
    outcome = Outcome.OPTIMAL if state.proven else Outcome.FEASIBLE
    return Solution(
        outcome,
        state.schedule,
        state.evaluation,
        state.cost,
        state.bound,
        seconds,
        needed,
        stage,
        strategy,
        tuple(state.log),
    )
