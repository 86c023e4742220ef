"""The state of one climb up the ladder: the best schedule, the best bound, and the time left."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from port_planner.milp.conflict import Shortfall
from port_planner.milp.highs import Progress
from port_planner.problem.problem import Problem, Schedule
from port_planner.problem.replay import ScheduleCost, replay
from port_planner.problem.variants import min_extra_joules
from port_planner.search import clock
from port_planner.search.greedy.search import Greedy

OPTIMAL_GAP = 1e-4
"""Relative distance at which a schedule counts as optimal; HiGHS works to about this precision."""

Judge = Callable[[Problem, Schedule], ScheduleCost]
"""Measures a schedule: the replay or, for a captured step, the program to which it is lowered."""


@dataclass(slots=True)
class Climb:
    """The state of one climb: the best schedule so far, the best bound so far, and the time left."""

    problem: Problem
    deadline: float
    progress: Progress | None = None
    schedule: Schedule | None = None
    evaluation: ScheduleCost | None = None
    cost: float = math.inf
    bound: float = field(init=False)
    infeasible: bool = False
    missed: tuple[Shortfall, ...] = ()
    """Limits that an infeasible relaxation misses, by their names in the model."""
    greedy: Greedy | None = None
    judge: Judge = replay
    paging: bool = True
    recompute: bool = True
    """Whether schedules may recompute; baselines exclude one of these."""
    seconds_per_return: float = 0.0
    """Seconds to build the last model, per return stage that it offers."""
    log: list[str] = field(default_factory=list)
    began: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), time.process_time()))

    def __post_init__(self) -> None:
        self.bound = min_extra_joules(self.problem)

    @property
    def left(self) -> float:
        """CPU seconds left, or attempts if the clock counts these."""
        return self.deadline - clock.now()

    def wall(self, cpu_seconds: float) -> float:
        """Return how long `cpu_seconds` currently take on this machine, because HiGHS limits only wall-clock time."""
        cpu_seconds = clock.solver_seconds(cpu_seconds)
        elapsed = time.perf_counter() - self.began[0]
        used = time.process_time() - self.began[1]
        return cpu_seconds * min(max(elapsed / used, 1.0), 8.0) if used > 0.02 else cpu_seconds

    @property
    def proven(self) -> bool:
        """Whether the best schedule is as good as the bound."""
        return math.isfinite(self.cost) and self.cost - self.bound <= OPTIMAL_GAP * abs(self.cost) + 1e-15

    def offer(self, schedule: Schedule, rung: str) -> bool:
        """Keep `schedule` if it is valid and better; return whether it was kept."""
        clock.note_attempt()
        evaluation = self.judge(self.problem, schedule)
        cost = objective(self.problem, evaluation)
        self.log.append(f"{rung}: {cost:.6g} J{'' if evaluation.valid else ' invalid: ' + evaluation.errors[0]}")
        if not evaluation.valid or cost >= self.cost:
            return False
        self.schedule, self.evaluation, self.cost = schedule, evaluation, cost
        self.report()
        return True

    def raise_bound(self, bound: float) -> None:
        """Adopt a proved lower bound."""
        if math.isfinite(bound) and bound > self.bound:
            self.bound = min(bound, self.cost)
            self.report()

    def report(self) -> None:
        """Report to the observer, if any."""
        if self.progress is not None:
            self.progress(self.cost, self.bound)


class GainRate:
    """The gain of a search per attempt, as a share of the whole step's cost.

    Attempts are counted because a clock never gives the same number twice.
    """

    def __init__(self, state: Climb, min_gain: float) -> None:
        """`min_gain`: the share of the step's cost by which a full period of attempts should lower it."""
        self._state, self._min_gain = state, min_gain
        self._attempts, self._was = 0, state.cost

    def is_too_low(self, period: int) -> bool:
        """Record an attempt; return whether the last full `period` of them gained too little.

        Later attempts gain even less.
        """
        state, self._attempts = self._state, self._attempts + 1
        if self._attempts < period:
            return False
        gained, self._attempts, self._was = self._was - state.cost, 0, state.cost
        return gained < self._min_gain * (state.problem.base_joules + state.cost)


def objective(problem: Problem, evaluation: ScheduleCost) -> float:
    """Return the joules that planning minimises: overhead, and static power while the step waits for transfers."""
    return evaluation.overhead_joules + problem.static_watts * evaluation.stall_seconds
