"""Plan a step as it was seen to run, in a process of its own beside the program.

`python -m planner.search.traced_plan`.

A greedy plan is there within a second, the search's replaces it. Every plan was replayed: its bytes fit, or it is none.
"""

import os
import sys
from collections.abc import Iterator

import msgspec

from planner.ir.traced import TracedPlan, TracedRequest, pack_traced_plan
from planner.problem.model import Problem, Schedule
from planner.problem.replay import ScheduleCost, replay
from planner.problem.traced_step import TracedProblem, traced_problem
from planner.search.solve import solve

_NICENESS = 19
"""Of the process: the program goes first."""


def traced_plans(request: TracedRequest) -> Iterator[TracedPlan]:
    """Yield valid plans, each needing fewer joules than the one before."""
    traced = traced_problem(
        request.step, request.device, tensor_bytes=request.tensor_bytes, deadline_s=request.deadline_s,
        write_limit_bytes=request.write_limit_bytes,
    )  # fmt: skip

    def judge(problem: Problem, schedule: Schedule) -> ScheduleCost:
        return replay(problem, traced.without_intermediates(schedule))

    least = float("inf")
    for strategy in ("greedy", "milp") if request.search_s > 0 else ("greedy",):
        found = solve(traced.problem, time_limit_s=request.search_s, strategy=strategy, judge=judge)
        if found.schedule is None or found.evaluation is None or found.evaluation.joules >= least:
            continue
        least = found.evaluation.joules
        yield _plan(traced, found.schedule, found.evaluation, strategy)


def _plan(traced: TracedProblem, schedule: Schedule, cost: ScheduleCost, strategy: str) -> TracedPlan:
    schedule = traced.without_intermediates(schedule)
    return TracedPlan(
        traced.departures(schedule), strategy, cost.seconds, traced.moved_seconds(schedule, cost.written_bytes)
        + cost.recompute_seconds, cost.joules, cost.peak_bytes,
    )  # fmt: skip


def main() -> int:
    """Read a request from standard input, write plans to standard output, the best last."""
    os.nice(_NICENESS)
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TracedRequest)
    for plan in traced_plans(request):
        sys.stdout.buffer.write(pack_traced_plan(plan))
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
