"""Plan an observed step in a process beside the program: `python -m port_planner.search.traced_plan`.

A greedy plan is available within a second; the search's plan replaces it. Every plan was replayed and fits its budget.
"""

import os
import sys
from collections.abc import Iterator

import msgspec

from port_planner.ir.costs import DeviceCosts
from port_planner.ir.traced import TracedPlan, TracedRequest, pack_traced_plan
from port_planner.problem.problem import Problem, Schedule
from port_planner.problem.replay import ScheduleCost, replay
from port_planner.problem.traced_step import TracedProblem, traced_problem
from port_planner.search.solve import solve
from port_planner.search.wear import SPARING_TIME, costliest_wear, visible_share, with_wear

_NICENESS = 19
"""Niceness of the process: the program takes precedence."""


def traced_plans(request: TracedRequest) -> Iterator[TracedPlan]:
    """Yield valid plans, each costing fewer joules than the previous one; some trade time for less flash wear.

    The first ignores wear; those that consider it take at most `SPARING_TIME` of its seconds.
    """
    device, step = request.device, request.step
    wears = costliest_wear(device) > 0
    charged = _problem(request, device, request.deadline_s)
    share, deadline_s, least = 0.0, request.deadline_s, float("inf")
    better = ("milp",) if request.search_s > 0 else ("greedy",) if wears else ()
    for strategy in ("greedy", *better):
        schedule = _solved(_problem(request, with_wear(device, share), deadline_s), request.search_s, strategy)
        if schedule is None:
            continue
        cost = replay(charged.problem, schedule)
        if cost.joules < least:
            least = cost.joules
            yield _plan(charged, schedule, cost, strategy)
        if wears and share == 0.0:
            step_joules = (device.compute_watts + device.static_watts) * sum(op.seconds for op in step.ops)
            share = visible_share(device, step_joules, sum(s.nbytes for s in step.storages))
            deadline_s = min(SPARING_TIME * cost.seconds, deadline_s or float("inf"))


def _problem(request: TracedRequest, device: DeviceCosts, deadline_s: float | None) -> TracedProblem:
    return traced_problem(
        request.step,
        device,
        tensor_bytes=request.tensor_bytes,
        deadline_s=deadline_s,
        write_limit_bytes=request.write_limit_bytes,
    )


def _solved(traced: TracedProblem, search_s: float, strategy: str) -> Schedule | None:
    def judge(problem: Problem, schedule: Schedule) -> ScheduleCost:
        return replay(problem, traced.without_intermediates(schedule))

    found = solve(traced.problem, time_limit_s=search_s, strategy=strategy, judge=judge)
    return None if found.schedule is None else traced.without_intermediates(found.schedule)


def _plan(traced: TracedProblem, schedule: Schedule, cost: ScheduleCost, strategy: str) -> TracedPlan:
    worn_joules = traced.device.flash.wear_joules_per_byte * cost.written_bytes
    return TracedPlan(
        traced.departures(schedule),
        strategy,
        cost.seconds,
        traced.moved_seconds(schedule, cost.written_bytes) + cost.recompute_seconds,
        cost.joules - worn_joules,
        cost.peak_bytes,
        cost.written_bytes,
    )


def main() -> int:
    """Read a request from standard input and write plans to standard output, the best last."""
    os.nice(_NICENESS)
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TracedRequest)
    for plan in traced_plans(request):
        sys.stdout.buffer.write(pack_traced_plan(plan))
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
