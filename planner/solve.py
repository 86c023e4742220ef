"""Plans: from a problem or a captured step to a schedule, with a bound, a gap and a plain statement of what it is."""

import enum
import time
from dataclasses import dataclass, replace

from planner.baselines import BASELINES
from planner.coarsen import Coarse, coarsen
from planner.costs import CostTable
from planner.errors import PortError
from planner.graph import StepGraph
from planner.greedy import greedy
from planner.plan import Plan
from planner.problem import Problem, Schedule
from planner.problem_replay import Evaluation, replay
from planner.program import BudgetError, PlanError, Program, expand
from planner.solve_climb import Climb, Judge
from planner.solve_highs import Progress
from planner.solve_ladder import climb
from planner.units import format_bytes, format_seconds

MAX_TIGHTENINGS = 6
STRATEGIES = ("milp", "greedy", *BASELINES)


class Outcome(enum.Enum):
    """How planning ended; the value is what to tell the user."""

    OPTIMAL = "proven optimal for this order of operators"
    FEASIBLE = "within its budgets; a longer --time-limit may find a cheaper plan"
    INFEASIBLE = "no plan fits these budgets; raise --ram or the deadline, or use a smaller batch"
    TIMED_OUT = "the time limit passed before any plan was found; raise --time-limit or --ram"


class StrategyError(PortError):
    """A planning strategy that does not exist."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver says about an abstract problem.

    `overhead_joules`: energy beyond running every stage once, static power while waiting for transfers included.

    `bound_joules`: a proven lower bound on the overhead of every schedule of this class. `log`: what each rung gave.
    """

    outcome: Outcome
    schedule: Schedule | None
    evaluation: Evaluation | None
    overhead_joules: float | None
    bound_joules: float | None
    seconds: float
    needed_bytes: int | None = None
    needed_stage: int | None = None
    strategy: str = "greedy"
    log: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """What happened, with which numbers, what to do."""
        if self.schedule is None and self.needed_bytes is not None and self.outcome is Outcome.INFEASIBLE:
            return (
                f"{self.outcome.value}; the fullest stage ({self.needed_stage}) needs {self.needed_bytes} B "
                "when everything else is paged out"
            )
        return self.outcome.value

    @property
    def gap(self) -> float | None:
        """Relative distance between overhead and bound; None while either is unknown."""
        return relative_gap(self.overhead_joules, self.bound_joules)


def relative_gap(value: float | None, bound: float | None) -> float | None:
    """Return (value - bound) / value, 0 where both vanish, None where either is unknown."""
    if value is None or bound is None:
        return None
    return max(value - bound, 0.0) / value if value > 1e-15 else 0.0


@dataclass(frozen=True, slots=True)
class PlanResult:
    """What planning a captured step gave.

    `plan` is None unless `outcome` is OPTIMAL or FEASIBLE. `bound_joules`: no plan of this class has less overhead.
    When infeasible: `needed_bytes` is the smallest budget that does, `needed_op` the op that needs it, `holders` the
    (name, bytes) that are resident there.
    """

    outcome: Outcome
    plan: Plan | None
    bound_joules: float | None
    gap: float | None
    seconds: float
    message: str
    needed_bytes: int | None = None
    needed_op: int | None = None
    holders: tuple[tuple[str, int], ...] = ()


def plan_step(
    graph: StepGraph,
    costs: CostTable,
    *,
    ram_bytes: int,
    deadline_s: float | None = None,
    time_limit_s: float = 20.0,
    strategy: str = "milp",
    progress: Progress | None = None,
) -> PlanResult:
    """Return a plan for one captured step within `ram_bytes` of resident memory, the worker's own base included."""
    begin = time.process_time()
    target = ram_bytes
    for _ in range(MAX_TIGHTENINGS):
        coarse = coarsen(graph, costs, ram_bytes=target, deadline_s=deadline_s)
        judge = program_judge(graph, costs, coarse, ram_bytes)
        left = time_limit_s - (time.process_time() - begin)
        solution = solve(coarse.problem, time_limit_s=left, strategy=strategy, progress=progress, judge=judge)
        if solution.schedule is None:
            return _failure(coarse, solution, begin)
        plan = coarse.plan(solution.schedule, ram_bytes, strategy)
        try:
            program = expand(graph, costs, plan)
        except BudgetError as error:
            target -= error.needed_bytes - ram_bytes
            continue
        return _success(costs, plan, program, solution, begin)
    return PlanResult(Outcome.INFEASIBLE, None, None, None, time.process_time() - begin, Outcome.INFEASIBLE.value)


def program_judge(graph: StepGraph, costs: CostTable, coarse: Coarse, ram_bytes: int) -> Judge:
    """Return a judge that expands a schedule to the program an executor would follow, and measures that."""
    base_joules = sum(c.joules + costs.device.static_watts * c.seconds for c in costs.ops)

    def judge(problem: Problem, schedule: Schedule) -> Evaluation:
        result = Evaluation()
        try:
            program = expand(graph, costs, coarse.plan(schedule, ram_bytes, "candidate"))
        except PlanError as error:
            result.errors.append(str(error))
            return result
        waiting = costs.device.static_watts * program.stall_seconds
        result.joules, result.seconds = program.joules, program.seconds
        result.stall_seconds, result.recompute_seconds = program.stall_seconds, program.recompute_seconds
        result.static_joules = waiting
        result.overhead_joules = program.joules - base_joules - waiting
        result.peak_bytes, result.written_bytes = program.peak_bytes, program.written_bytes
        result.read_bytes = program.read_bytes
        if problem.deadline_s is not None and program.seconds > problem.deadline_s * (1 + 1e-9):
            result.errors.append(f"the step takes {program.seconds:g} s, the deadline is {problem.deadline_s:g} s")
        return result

    return judge


def _success(costs: CostTable, plan: Plan, program: Program, solution: Solution, begin: float) -> PlanResult:
    base_seconds = sum(c.seconds for c in costs.ops)
    base = sum(c.joules for c in costs.ops) + costs.device.static_watts * base_seconds
    overhead = program.joules - base
    plan = replace(
        plan,
        peak_bytes=program.peak_bytes,
        seconds=program.seconds,
        joules=program.joules,
        overhead_joules=overhead,
        bound_joules=solution.bound_joules,
    )
    gap = relative_gap(overhead, solution.bound_joules)
    message = f"{solution.outcome.value}: peak {format_bytes(program.peak_bytes)}, {format_seconds(program.seconds)}"
    seconds = time.process_time() - begin
    return PlanResult(solution.outcome, plan, solution.bound_joules, gap, seconds, message)


def _failure(coarse: Coarse, solution: Solution, begin: float) -> PlanResult:
    """Say which op needs how much, and which tensors hold it."""
    base = coarse.costs.device.base_bytes
    seconds = time.process_time() - begin
    if solution.needed_stage is None or solution.needed_bytes is None:
        return PlanResult(solution.outcome, None, None, None, seconds, solution.outcome.value)
    first, last = coarse.ranges[solution.needed_stage]
    op = max(range(first, last + 1), key=lambda i: coarse.costs.ops[i].workspace_bytes)
    stage = solution.needed_stage
    touched = [t for t in coarse.problem.tensors if stage in t.accesses]
    holders = tuple(sorted(((t.name, t.nbytes) for t in touched), key=lambda h: -h[1])[:8])
    needed = solution.needed_bytes + base
    names = ", ".join(f"{name} {format_bytes(size)}" for name, size in holders[:3]) or "storages too small to move"
    message = (
        f"no plan fits: op {op} ({coarse.graph.ops[op].name}) needs {format_bytes(needed)}, of which {format_bytes(base)} "
        f"for the process itself, with {names} resident; "
        f"raise --ram to at least {format_bytes(needed)} or use a smaller batch"
    )
    return PlanResult(solution.outcome, None, None, None, seconds, message, needed, op, holders)


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 20.0,
    strategy: str = "milp",
    progress: Progress | None = None,
    judge: Judge = replay,
) -> Solution:
    """Return the best schedule that `strategy` finds for `problem` within `time_limit_s` of CPU time."""
    begin = time.process_time()
    if strategy == "milp":
        state = climb(problem, time_limit_s, progress, judge)
    elif strategy == "greedy":
        state = _greedy_climb(problem, time_limit_s, progress, judge)
    elif strategy in BASELINES:
        state = BASELINES[strategy](problem, time_limit_s, judge)
    else:
        raise StrategyError(f"there is no planning strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    return _solution(state, begin, strategy)


def _greedy_climb(problem: Problem, time_limit_s: float, progress: Progress | None, judge: Judge) -> Climb:
    state = Climb(problem, time.process_time() + time_limit_s, progress, judge=judge)
    state.greedy = greedy(problem)
    if state.greedy.schedule is not None:
        state.offer(state.greedy.schedule, "greedy")
    return state


def _solution(state: Climb, begin: float, strategy: str) -> Solution:
    seconds = time.process_time() - begin
    needed = state.greedy.needed_bytes if state.greedy is not None else None
    stage = state.greedy.stage if state.greedy is not None else None
    if state.schedule is None:
        ended = Outcome.INFEASIBLE if state.infeasible or state.left > 0 else Outcome.TIMED_OUT
        return Solution(ended, None, None, None, None, seconds, needed, stage, strategy, tuple(state.log))
    outcome = Outcome.OPTIMAL if state.proven else Outcome.FEASIBLE
    return Solution(
        outcome, state.schedule, state.evaluation, state.cost, state.bound, seconds, needed, stage, strategy,
        tuple(state.log),
    )  # fmt: skip
