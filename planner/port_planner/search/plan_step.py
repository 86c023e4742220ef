"""Plans of captured steps: coarsen, reorder if that lowers the peak, solve, lower, meet the deadline.

Every plan returned here has been lowered to the program that an executor follows, and its figures are that program's.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from port_planner.base.units import format_bytes, format_seconds
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import MIN_DECIDED_BYTES, Plan
from port_planner.ir.program import BudgetError, PlanError, Program
from port_planner.milp.highs import Progress
from port_planner.problem.coarsen import Coarse, coarsen
from port_planner.problem.problem import Problem, Schedule
from port_planner.problem.reorder import peak_bytes, reorder
from port_planner.problem.replay import ScheduleCost
from port_planner.search import clock
from port_planner.search.anytime import relaxation_bound
from port_planner.search.floor import Floor, floor_of, floor_plans
from port_planner.search.greedy.search import Greedy, greedy
from port_planner.search.incumbent import OPTIMAL_GAP, objective
from port_planner.search.solve import Outcome, Solution, relative_gap, solve
from port_planner.search.wear import SPARING_TIME, costliest_wear, visible_share, with_wear

TIGHTENINGS = 4
"""Number of times that planning is repeated for a smaller budget if a program needs more than the coarse problem
counted."""

WORTH_REORDERING = 0.01
"""Share of the peak that another order must save to be tried, because trying it costs two greedy searches."""

MAX_HOLDERS = 8
"""Largest number of tensors in an error message."""

DECIDED_SHARE = 1 / 256
"""Share of the step's own memory: storages this small are always kept, even in a step whose tensors are all small."""

LADDER = ("milp", "greedy")
"""Strategies that always find a plan if there is one; the others are baselines with their own limits."""

_ROUNDING = 1e-9
"""Relative rounding error of sums in a different order."""

FINISHING = 0.1
"""Share of the time limit that the search leaves free, because it finishes the current
neighbourhood when its time is up.
"""

RIVAL_SHARES = (0.97, 0.9)
"""Shares of the memory for tensors for which further plans are searched, in the time that the search leaves.

With them the search ends at other schedules, and a plan for less memory is also valid for more.
"""

HURRIED_WATTS = (8.0, 25.0, 100.0)
"""Static watts added to the device's own, from few to very many, to make the planner buy time with energy."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The limits of a step: resident bytes including the worker's own, seconds, bytes written to flash.

    None: unlimited.
    """

    ram_bytes: int
    deadline_s: float | None = None
    write_limit_bytes: int | None = None

    def passed_by(self, program: Program) -> bool:
        """Return whether a program takes longer or writes more than allowed."""
        late = self.deadline_s is not None and program.seconds > self.deadline_s * (1 + _ROUNDING)
        return late or (self.write_limit_bytes is not None and program.written_bytes > self.write_limit_bytes)


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The result of planning a captured step.

    `plan` is None unless `outcome` is OPTIMAL or FEASIBLE. `bound_joules`: no plan of this class has less overhead. If
    infeasible: `needed_bytes` is the smallest sufficient budget, `needed_op` the op that needs it, `holders` the (name,
    bytes) that are resident there, and `remedy` what else would help. `fastest_seconds`, if only the deadline is too
    short: the least seconds of any plan found within the budget.
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
    fastest_seconds: float | None = None
    remedy: str = ""


def plan_step(
    graph: StepGraph,
    costs: CostTable,
    *,
    ram_bytes: int,
    deadline_s: float | None = None,
    time_limit_s: float = 20.0,
    strategy: str = "milp",
    rivals: Iterable[Plan] = (),
    iterations: int | None = None,
) -> PlanResult:
    """Return a plan for one captured step within `ram_bytes` of resident memory, as `plan_within` does.

    `iterations`: limit of attempts in place of `time_limit_s`. The plan is then the same in each run.
    """
    limits = PlanLimits(ram_bytes, deadline_s)
    if iterations is not None:
        with clock.counted():
            return plan_within(graph, costs, limits, time_limit_s=iterations, strategy=strategy, rivals=rivals)
    return plan_within(graph, costs, limits, time_limit_s=time_limit_s, strategy=strategy, rivals=rivals)


def plan_within(
    graph: StepGraph,
    costs: CostTable,
    limits: PlanLimits,
    *,
    time_limit_s: float,
    strategy: str,
    progress: Progress | None = None,
    rivals: Iterable[Plan] = (),
) -> PlanResult:
    """Return a plan for one captured step within limits; resident memory includes the worker's own base.

    `rivals`: plans of the same step, for example from other strategies. If one of them is valid and costs less energy
    and wear, it is returned.
    """
    request = _PlanRequest(graph, costs, limits, time_limit_s, strategy, progress, tuple(rivals))
    return _packing(request) if costs.packings and strategy in LADDER else _within(request)


@dataclass(frozen=True, slots=True)
class _PlanRequest:
    """A plan to search for: the step, the limits, the seconds of CPU time, and the method."""

    graph: StepGraph
    costs: CostTable
    limits: PlanLimits
    time_limit_s: float
    strategy: str
    progress: Progress | None
    rivals: tuple[Plan, ...]
    unpacked_known: bool = False
    """Whether the greedy search's result without packing is among the rivals."""
    order: tuple[int, ...] | None = None
    """The order of the operators, if already decided."""
    bounded: PlanLimits | None = None
    """Limits that the bound must hold for, if they are wider than those of the plan."""

    @property
    def quick(self) -> "_PlanRequest":
        """The same request, by greedy search alone."""
        return replace(self, strategy="greedy", progress=None)


def _packing(request: _PlanRequest) -> PlanResult:
    """Return a plan that takes no more joules, seconds or written bytes than the greedy
    search's result without packing.

    One more kind of decision must not raise the cost, but the search then meets other plans first, and these are not
    always better. On flash that wears out, a plan that writes less may take a little longer.
    """
    begin = clock.now()
    graph, costs = request.graph, request.costs
    bare = _within(replace(request.quick, costs=replace(costs, packings=())))
    if bare.plan is None:
        return _within(request)
    takes = lower(graph, costs, bare.plan)
    as_bare = replace(request.limits, write_limit_bytes=takes.written_bytes)
    order = None if request.strategy == "greedy" else bare.plan.order
    limited = replace(request, limits=as_bare, rivals=(*request.rivals, bare.plan), order=order)
    if costliest_wear(costs.device):
        found = _sparing(limited)
    else:
        in_time = replace(as_bare, deadline_s=takes.seconds)
        found = _plan(replace(limited, limits=in_time, unpacked_known=True, bounded=request.limits))
    plan = found.plan if _takes_no_more(graph, costs, found.plan, takes) else with_figures(bare.plan, costs, takes)
    if order is not None and (plan is None or plan.order != order or costliest_wear(costs.device)):
        found = replace(found, bound_joules=None)  # it holds for another order, or for cheaper wear
    return _bounded(request, replace(found, plan=plan), begin)


def _bounded(request: _PlanRequest, found: PlanResult, begin: float) -> PlanResult:
    """Return the result for narrower limits than requested, with a bound for the requested ones."""
    plan, bound, outcome = found.plan, found.bound_joules, Outcome.FEASIBLE
    if plan is None:
        return found
    if bound is None and request.strategy != "greedy":
        limits = request.limits
        coarse = coarsen(
            request.graph,
            request.costs,
            ram_bytes=limits.ram_bytes,
            deadline_s=limits.deadline_s,
            write_limit_bytes=limits.write_limit_bytes,
            order=plan.order,
        )
        bound = relaxation_bound(coarse.problem, request.time_limit_s)
    gap = relative_gap(plan.overhead_joules, bound)
    if gap is not None and gap <= OPTIMAL_GAP:
        outcome = Outcome.OPTIMAL
    return replace(
        found,
        plan=replace(plan, bound_joules=bound),
        outcome=outcome,
        bound_joules=bound,
        gap=gap,
        seconds=clock.now() - begin,
        message=_message(outcome, plan),
    )


def _takes_no_more(graph: StepGraph, costs: CostTable, plan: Plan | None, other: Program) -> bool:
    """Return whether there is a plan whose program takes no more of anything than another one.

    It may take the extra time that is allowed for writing less flash.
    """
    if plan is None:
        return False
    program = lower(graph, costs, plan)
    slower = SPARING_TIME if program.written_bytes < other.written_bytes and costliest_wear(costs.device) else 1.0
    pairs = (
        (program.cost_joules, other.cost_joules),
        (program.seconds, slower * other.seconds),
        (program.written_bytes, other.written_bytes),
    )
    return all(mine <= others * (1 + _ROUNDING) for mine, others in pairs)


def _within(request: _PlanRequest) -> PlanResult:
    """Return a plan within the limits that writes little to flash that wears out."""
    return _sparing(request) if costliest_wear(request.costs.device) else _in_time(request)


def _sparing(request: _PlanRequest) -> PlanResult:
    """Return a plan that writes little to flash that wears out, and is not much slower than
    one planned without wear.
    """
    begin = clock.now()
    graph, costs, limits = request.graph, request.costs, request.limits
    share = visible_share(costs.device, base_joules(costs), sum(s.nbytes for s in graph.storages))
    unworn, seen_costs = (replace(costs, device=with_wear(costs.device, part)) for part in (0.0, share))
    careless = _in_time(replace(request.quick, costs=unworn))
    if careless.plan is None:
        careless = _in_time(replace(request, costs=unworn, time_limit_s=request.time_limit_s / 3))
    if careless.plan is None:
        return careless
    slowest_s = SPARING_TIME * careless.plan.seconds
    limits = replace(limits, deadline_s=slowest_s if limits.deadline_s is None else min(slowest_s, limits.deadline_s))
    spent = clock.now() - begin
    unhurried = replace(request, costs=seen_costs, limits=replace(limits, deadline_s=None))
    seen = _plan(replace(unhurried, time_limit_s=request.time_limit_s - spent))
    quick = seen if request.strategy == "greedy" else _plan(unhurried.quick)
    known = tuple(plan for plan in (careless.plan, quick.plan, seen.plan, *request.rivals) if plan is not None)
    if seen.plan is None or seen.plan.seconds > slowest_s:
        seen = _plan(replace(unhurried, limits=limits, time_limit_s=request.time_limit_s / 2, rivals=known))
    found = better_of(graph, costs, limits, found=_restated(graph, costs, seen), rivals=known)
    return replace(found, seconds=clock.now() - begin)


def _restated(graph: StepGraph, costs: CostTable, found: PlanResult) -> PlanResult:
    """Return a result for cheaper wear with its figures under these costs; its bound stays valid."""
    if found.plan is None:
        return found
    plan = with_figures(found.plan, costs, lower(graph, costs, found.plan), found.bound_joules)
    gap = relative_gap(plan.overhead_joules, found.bound_joules)
    return replace(found, plan=plan, outcome=Outcome.FEASIBLE, gap=gap)


def _in_time(request: _PlanRequest) -> PlanResult:
    """Return a plan that keeps the deadline, if there is one."""
    graph, costs, limits, time_limit_s = request.graph, request.costs, request.limits, request.time_limit_s
    untimed, deadline_s = replace(request, limits=replace(limits, deadline_s=None)), limits.deadline_s
    begin = clock.now()
    free = _plan(untimed if deadline_s is None else replace(untimed, time_limit_s=time_limit_s / 3))
    if free.plan is None and limits.write_limit_bytes is None:
        free = _confirmed(replace(request.quick, rivals=()), free)
    if deadline_s is None or free.plan is None or free.plan.seconds <= deadline_s:
        return free
    hurried = [
        found.plan
        for watts in HURRIED_WATTS
        if (
            found := _plan(replace(untimed, costs=_paying(costs, watts), time_limit_s=time_limit_s / 9, rivals=()))
        ).plan
    ]
    known = (*hurried, free.plan, *request.rivals)
    left = max(time_limit_s - (clock.now() - begin), 0.2 * time_limit_s)
    result = _plan(replace(request, time_limit_s=left, rivals=known))
    spent = clock.now() - begin
    if result.plan is not None:
        return replace(result, seconds=spent)
    return _too_slow(graph, costs, limits.ram_bytes, deadline_s, known, spent)


def _confirmed(request: _PlanRequest, failed: PlanResult) -> PlanResult:
    """Return a failure that names a budget with a plan, found by trying."""
    for _ in range(TIGHTENINGS):
        if failed.needed_bytes is None:
            break
        tried = _plan(replace(request, limits=PlanLimits(failed.needed_bytes)))
        if tried.plan is not None or tried.needed_bytes is None or tried.needed_bytes <= failed.needed_bytes:
            break
        failed = replace(tried, seconds=failed.seconds + tried.seconds)
    return failed


def _paying(costs: CostTable, watts: float) -> CostTable:
    """Return the costs of a device that always draws `watts` more, so that its best plans are fast."""
    return replace(costs, device=replace(costs.device, static_watts=costs.device.static_watts + watts))


def _too_slow(
    graph: StepGraph, costs: CostTable, ram_bytes: int, deadline_s: float, plans: Sequence[Plan], spent: float
) -> PlanResult:
    """Return the failure that states how long the fastest of these plans takes, and by how much that is too long."""
    seconds = [p.seconds for plan in plans if (p := _measured(graph, costs, plan, ram_bytes)) is not None]
    fastest = min(seconds)
    message = (
        f"no plan within {format_bytes(ram_bytes)} is fast enough: the fastest takes {format_seconds(fastest)} a step, "
        f"the deadline leaves {format_seconds(deadline_s)}, {format_seconds(fastest - deadline_s)} less; raise "
        f"{costs.device.budget_option}, move the deadline or train fewer epochs"
    )
    return PlanResult(Outcome.INFEASIBLE, None, None, None, spent, message, fastest_seconds=fastest)


def _measured(graph: StepGraph, costs: CostTable, plan: Plan, ram_bytes: int) -> Program | None:
    """Return the program of `plan` under these costs; None if it does not fit the budget."""
    try:
        return lower(graph, costs, replace(plan, ram_bytes=ram_bytes))
    except PlanError:
        return None


def _plan(request: _PlanRequest) -> PlanResult:
    """Return a plan within the limits; above the step's floor there is one unless time or writes are limited."""
    begin = clock.now()
    graph, costs, limits = request.graph, request.costs, request.limits
    floor = floor_of(graph, costs)
    if limits.ram_bytes < floor.nbytes:
        return _below(floor, limits, begin)
    decided = min(MIN_DECIDED_BYTES, int(DECIDED_SHARE * (limits.ram_bytes - costs.device.base_bytes)))
    found = _coarse_plan(request, decided)
    # Keeping everything sometimes fits even if the coarse problem, which overestimates, says otherwise.
    keep_all = dict.fromkeys((Plan(), Plan(order=reorder(graph))))
    found = better_of(graph, costs, limits, found=found, rivals=(*keep_all, *request.rivals))
    found = better_of(graph, costs, limits, found=found, rivals=_rivals(request, found, decided, floor, begin))
    left = request.time_limit_s - (clock.now() - begin)
    if found.plan is None and request.strategy in LADDER and left > 0:
        finer = _coarse_plan(replace(request, time_limit_s=left), 0)
        found = finer if finer.plan is not None else found
    if found.plan is None and request.strategy in LADDER:
        found = better_of(graph, costs, limits, found=found, rivals=floor_plans(graph, limits.ram_bytes))
    return found


def _rivals(request: _PlanRequest, found: PlanResult, decided: int, floor: Floor, begin: float) -> Iterator[Plan]:
    """Yield plans for somewhat less memory, while time remains and the plan found is not known to be optimal."""
    limits, base_bytes = request.limits, request.costs.device.base_bytes
    for share in RIVAL_SHARES:
        less_bytes = base_bytes + int(share * (limits.ram_bytes - base_bytes))
        left = request.time_limit_s - (clock.now() - begin)
        known = found.plan is None or found.outcome is Outcome.OPTIMAL or request.strategy != "milp"
        if known or less_bytes < floor.nbytes or left < FINISHING * request.time_limit_s:
            return
        less = replace(limits, ram_bytes=less_bytes)
        rival = _coarse_plan(replace(request, limits=less, time_limit_s=left, progress=None, rivals=()), decided)
        if rival.plan is not None:
            yield rival.plan


def _below(floor: Floor, limits: PlanLimits, begin: float) -> PlanResult:
    """Return the failure that states what determines the floor of a step, and what lowers it."""
    message = (
        f"no plan fits {format_bytes(limits.ram_bytes)}: op {floor.op} ({floor.operator}) needs "
        f"{format_bytes(floor.nbytes)} with {floor.held} resident"
    )
    held = tuple((str(held), held.nbytes) for held in floor.holders)
    return PlanResult(
        Outcome.INFEASIBLE,
        None,
        None,
        None,
        clock.now() - begin,
        message,
        floor.nbytes,
        floor.op,
        held[:MAX_HOLDERS],
        remedy=f"lower the floor: {floor.remedy}",
    )


def _coarse_plan(request: _PlanRequest, min_bytes: int) -> PlanResult:
    """Return the plan of a problem that decides about storages of at least `min_bytes`."""
    begin = clock.now()
    graph, costs, limits, ram_bytes = request.graph, request.costs, request.limits, request.limits.ram_bytes
    start, order = None, request.order
    if order is None:
        start = _best_start(graph, costs, ram_bytes)
        order = () if start is None else start.coarse.order
    unlimited = limits.deadline_s is None and limits.write_limit_bytes is None and min_bytes == MIN_DECIDED_BYTES
    target, overruns = ram_bytes, list[BudgetError]()
    for _ in range(1 + TIGHTENINGS):
        if start is not None and unlimited and target == ram_bytes:
            coarse, found_first = start.coarse, start.found
            judge = replace(start.judge, overruns=overruns)
        else:
            coarse, found_first = coarsen(
                graph, costs, ram_bytes=target, deadline_s=limits.deadline_s, write_limit_bytes=limits.write_limit_bytes,
                order=order, min_bytes=min_bytes,
            ), None  # fmt: skip
            judge = ProgramJudge(costs, coarse, ram_bytes, overruns)
        left = (1 - FINISHING) * request.time_limit_s - (clock.now() - begin)
        bounded = request.bounded or limits
        wider = replace(coarse.problem, deadline_s=bounded.deadline_s, write_limit_bytes=bounded.write_limit_bytes)
        solution = solve(
            coarse.problem,
            time_limit_s=left,
            strategy=request.strategy,
            progress=request.progress,
            judge=judge,
            first=found_first,
            unpacked_known=request.unpacked_known,
            bounded=wider,
        )
        if solution.schedule is not None or not overruns or left <= 0 or target <= (least := _least(coarse, solution)):
            break
        target = max(least, target - (overruns[-1].needed_bytes - ram_bytes))
    schedule = solution.schedule
    if schedule is None:
        found = _failure(coarse, solution, overruns, begin)
        if limits.write_limit_bytes is not None:
            allowed = (
                f"{format_bytes(limits.write_limit_bytes)} may be written in a step (--writes-per-step, --flash-life)"
            )
            found = replace(found, message=f"{found.message}; {allowed}")
    else:
        if target < ram_bytes:
            solution = replace(solution, bound_joules=None, outcome=Outcome.FEASIBLE)  # its bound is for less memory
        plan = coarse.plan(schedule, ram_bytes, request.strategy)
        found = _success(costs, plan, judge.program(schedule), solution, begin)
    return found


def better_of(
    graph: StepGraph, costs: CostTable, limits: PlanLimits, *, found: PlanResult, rivals: Iterable[Plan]
) -> PlanResult:
    """Return `found`, or the cheapest of `rivals` if that is valid within these limits and cheaper."""
    for rival in rivals:
        found = _cheaper(graph, costs, limits, found, rival)
    return found


def _least(coarse: Coarse, solution: Solution) -> int:
    """Return the smallest budget for which the coarse problem is known to have a schedule."""
    return coarse.costs.device.base_bytes + (solution.needed_bytes or 0)


def fine_bound(graph: StepGraph, costs: CostTable, *, ram_bytes: int, time_limit_s: float = 10.0) -> float | None:
    """Return a bound in joules on the overhead of every plan, coarsened or not; None if time was too short.

    It is the smallest relaxation, with a stage for each operator and a decision about every storage. Coarsening a step
    for this budget costs at most a plan's overhead minus this bound.
    """
    return relaxation_bound(coarsen(graph, costs, ram_bytes=ram_bytes, min_bytes=0).problem, time_limit_s)


@dataclass(slots=True)
class ProgramJudge:
    """Lowers a schedule to the program that an executor would follow, and measures it.

    A schedule that is clearly costlier than the cheapest seen is an error and is not measured.
    """

    costs: CostTable
    coarse: Coarse
    ram_bytes: int
    overruns: list[BudgetError] = field(default_factory=list)
    """Needs of the programs that do not fit."""
    cheapest: tuple[Schedule, Program] | None = None
    """The least joules of the programs within the limits."""

    def __call__(self, problem: Problem, schedule: Schedule) -> ScheduleCost:
        """Return the cost of a schedule's program, and its errors."""
        result = ScheduleCost()
        max_joules = math.inf if self.cheapest is None else self.cheapest[1].cost_joules
        try:
            program = self.program(schedule, max_joules)
        except PlanError as error:
            result.errors.append(str(error))
            if isinstance(error, BudgetError):
                self.overruns.append(error)
            return result
        waiting = self.costs.device.static_watts * program.stall_seconds
        result.joules, result.seconds = program.cost_joules, program.seconds
        result.stall_seconds, result.recompute_seconds = program.stall_seconds, program.recompute_seconds
        result.static_joules = waiting
        result.overhead_joules = program.cost_joules - base_joules(self.costs) - waiting
        result.peak_bytes, result.written_bytes = program.peak_bytes, program.written_bytes
        result.read_bytes = program.read_bytes
        if problem.deadline_s is not None and program.seconds > problem.deadline_s * (1 + _ROUNDING):
            result.errors.append(f"the step takes {program.seconds:g} s, the deadline is {problem.deadline_s:g} s")
        if problem.write_limit_bytes is not None and program.written_bytes > problem.write_limit_bytes:
            result.errors.append(
                f"{program.written_bytes} B are written, the limit is {problem.write_limit_bytes:.0f} B"
            )
        if result.valid and program.cost_joules < max_joules:
            self.cheapest = schedule, program
        return result

    def program(self, schedule: Schedule, max_joules: float = math.inf) -> Program:
        """Return the program of a schedule; raise PlanError if it has none, or only costlier ones than `max_joules`."""
        if self.cheapest is not None and self.cheapest[0] is schedule:
            return self.cheapest[1]
        coarse = self.coarse
        plan = replace(coarse.plan(schedule, self.ram_bytes, "candidate"), order=())  # the coarse graph already has it
        return lower(coarse.graph, coarse.costs, plan, max_joules=max_joules)


def best_order(graph: StepGraph, costs: CostTable, ram_bytes: int) -> tuple[int, ...]:
    """Return an order of the ops with a lower peak, if a quick plan in it also needs less energy;
    empty: the recorded order.
    """
    start = _best_start(graph, costs, ram_bytes)
    return () if start is None else start.coarse.order


@dataclass(frozen=True, slots=True)
class _Start:
    """The greedy search's result in one order, and its judge."""

    coarse: Coarse
    found: Greedy
    judge: ProgramJudge
    joules: float
    """Joules of the plan; infinite without one."""


def _best_start(graph: StepGraph, costs: CostTable, ram_bytes: int) -> _Start | None:
    """Return the cheaper of two quick plans, as recorded and in an order with a lower peak;
    None without such an order.
    """
    order = reorder(graph)
    if not order or peak_bytes(graph.reordered(order)) > (1 - WORTH_REORDERING) * peak_bytes(graph):
        return None
    recorded, reordered = (_start(graph, costs, ram_bytes, candidate) for candidate in ((), order))
    return reordered if reordered.joules < recorded.joules else recorded


def _start(graph: StepGraph, costs: CostTable, ram_bytes: int, order: tuple[int, ...]) -> _Start:
    coarse = coarsen(graph, costs, ram_bytes=ram_bytes, order=order)
    found, judge = greedy(coarse.problem), ProgramJudge(costs, coarse, ram_bytes, [])
    if found.schedule is None:
        return _Start(coarse, found, judge, math.inf)
    cost = judge(coarse.problem, found.schedule)
    return _Start(coarse, found, judge, objective(coarse.problem, cost) if cost.valid else math.inf)


def _cheaper(graph: StepGraph, costs: CostTable, limits: PlanLimits, found: PlanResult, rival: Plan) -> PlanResult:
    """Return `found`, or `rival` if that is valid and costs less energy and wear."""
    program = _measured(graph, costs, rival, limits.ram_bytes)
    if program is None or limits.passed_by(program):
        return found
    if found.plan is not None:
        mine, theirs = _overhead_joules(costs, program), found.plan.overhead_joules
        alike = math.isclose(mine, theirs, rel_tol=_ROUNDING)
        if mine > theirs or (alike and program.peak_bytes >= found.plan.peak_bytes):
            return found
    bound = found.bound_joules
    plan = with_figures(replace(rival, ram_bytes=limits.ram_bytes), costs, program, bound)
    return replace(
        found,
        plan=plan,
        outcome=Outcome.FEASIBLE,
        gap=relative_gap(plan.overhead_joules, bound),
        message=_message(Outcome.FEASIBLE, program),
        fastest_seconds=None,
    )


def base_joules(costs: CostTable) -> float:
    """Return the joules of a step that keeps everything, static power included."""
    return sum(c.joules + costs.device.static_watts * c.seconds for c in costs.ops)


def _overhead_joules(costs: CostTable, program: Program) -> float:
    return max(0.0, program.cost_joules - base_joules(costs))


def with_figures(plan: Plan, costs: CostTable, program: Program, bound: float | None = None) -> Plan:
    """Return `plan` with the figures of its program under these costs."""
    return replace(
        plan,
        peak_bytes=program.peak_bytes,
        seconds=program.seconds,
        joules=program.joules,
        overhead_joules=_overhead_joules(costs, program),
        bound_joules=bound,
    )


def _message(outcome: Outcome, takes: Program | Plan) -> str:
    return f"{outcome.value}: peak {format_bytes(takes.peak_bytes)}, {format_seconds(takes.seconds)}"


def _success(costs: CostTable, plan: Plan, program: Program, solution: Solution, begin: float) -> PlanResult:
    plan = with_figures(plan, costs, program, solution.bound_joules)
    gap = relative_gap(plan.overhead_joules, solution.bound_joules)
    seconds = clock.now() - begin
    return PlanResult(solution.outcome, plan, solution.bound_joules, gap, seconds, _message(solution.outcome, program))


def _failure(coarse: Coarse, solution: Solution, overruns: Sequence[BudgetError], begin: float) -> PlanResult:
    """Return the failure that states which op needs how much memory, and which tensors hold it.

    Its figures are those of programs that nearly fit, or of the coarse problem.
    """
    seconds = clock.now() - begin
    if overruns:
        nearest = min(overruns, key=lambda error: error.needed_bytes)
        held = [(coarse.graph.label(s), size) for s, size in nearest.holders]
        return _too_little(coarse, solution, seconds, nearest.needed_bytes, nearest.op, held)
    if solution.needed_stage is None or solution.needed_bytes is None:
        return PlanResult(solution.outcome, None, None, None, seconds, solution.outcome.value + solution.missed_rows)
    first, last = coarse.ranges[solution.needed_stage]
    op = max(range(first, last + 1), key=lambda i: coarse.costs.ops[i].workspace_bytes)
    stage = solution.needed_stage
    touched = [t for t in coarse.problem.tensors if stage in t.accesses]
    held = [(t.name, t.nbytes) for t in touched]
    return _too_little(coarse, solution, seconds, _least(coarse, solution), op, held)


def _too_little(
    coarse: Coarse, solution: Solution, seconds: float, needed: int, op: int, held: Iterable[tuple[str, int]]
) -> PlanResult:
    holders = tuple(sorted(held, key=lambda h: -h[1])[:MAX_HOLDERS])
    names = ", ".join(f"{name} {format_bytes(size)}" for name, size in holders[:3])
    message = (
        f"no plan fits: op {op} ({coarse.graph.operator_of_module(op)}) needs {format_bytes(needed)} with {names} "
        f"resident{solution.missed_rows}"
    )
    return PlanResult(
        solution.outcome, None, None, None, seconds, message, needed, op, holders, remedy="use a smaller batch"
    )
