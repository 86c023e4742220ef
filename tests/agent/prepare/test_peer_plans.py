"""Plans of paired devices, as planning takes them: checked here, refused by name, and one's own given in return."""

from dataclasses import replace
from functools import cache, partial

import msgspec
import pytest

from port_agent.peers.connection.messages import QUESTION_LIMIT_BYTES
from port_agent.peers.exchange.answers import Topic
from port_agent.prepare import peer_plans
from port_agent.prepare.peer_plans import PeerPlans
from port_planner.ir.bundle.manifest import NO_LIMITS
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph
from port_planner.ir.plan import Plan
from port_planner.search.plan_problem import PlanProblem, pack_answer, plan_problem
from port_planner.search.plan_step import PlanResult
from port_planner.search.solve import Outcome
from tests.agent.prepare.other_device import Others, Solve
from tests.planner.estimated_steps import budget, captured


def honest(problem: PlanProblem) -> bytes:
    return pack_answer(problem.solved())


def planned(others: Others, *, shares: bool = False, solves: bool = True) -> tuple[PlanResult, list[str], int]:
    """Plan a step with a paired device; returns the result, what the user is told, and how often this device solved."""
    here = 0

    def local(graph: StepGraph, costs: CostTable, ram_bytes: int) -> PlanResult:
        nonlocal here
        here += 1
        return solved_here()

    problem_of = partial(plan_problem, strategy="milp", time_limit_s=4.0, limits=NO_LIMITS)
    peers = PeerPlans(others, shares=shares, solves=solves)
    graph, costs = captured()
    return peers.planner(local, problem_of)(graph, costs, budget(0.4)), peers.report(), here


@cache
def solved_here() -> PlanResult:
    graph, costs = captured()
    return PlanProblem(graph, costs, budget(0.4), time_limit_s=4.0).solved()


def own() -> Plan:
    plan = solved_here().plan
    assert plan is not None
    return plan


@pytest.mark.slow
def test_a_plan_solved_elsewhere_is_the_one_of_here() -> None:
    others = Others(honest)
    result, report, here = planned(others)
    assert result.plan == replace(own(), bound_joules=None) and result.outcome is Outcome.FEASIBLE
    assert (report, here, others.accused) == (["1 plan solved on attic"], 0, [])


@pytest.mark.slow
def test_a_refusal_is_told_and_the_plan_is_made_here() -> None:
    result, report, here = planned(Others())
    assert result.plan == own() and here == 1
    assert report == ["solved here: attic: on battery 64 %"]


def lying(problem: PlanProblem) -> bytes:
    result = problem.solved()
    assert result.plan is not None
    return pack_answer(replace(result, plan=replace(result.plan, peak_bytes=result.plan.peak_bytes // 2)))


def overfull(problem: PlanProblem) -> bytes:
    return pack_answer(replace(problem.solved(), plan=Plan()))


WRONG: dict[str, Solve] = {
    "nothing": lambda problem: b"",
    "a pickle": lambda problem: b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    "cut off": lambda problem: honest(problem)[:-3],
    "too long": lambda problem: bytes(2 << 20),
    "a bomb of integers": lambda problem: msgspec.msgpack.encode([[b"\x78\x9c" + bytes(99), [0] * 6, ""], ""]),
    "a lie": lying,
    "beyond the budget": overfull,
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_plan_is_caught_told_and_accused_and_planning_goes_on(wrong: str) -> None:
    others = Others(WRONG[wrong])
    result, report, here = planned(others)
    assert result.plan == own() and here == 1
    assert len(others.accused) == 1 and others.accused[0].startswith("ID: ")
    assert report[0].startswith("attic gave a wrong answer and is temporarily blocked: ")


@pytest.mark.slow
def test_a_poor_plan_is_no_offence_and_is_not_taken() -> None:
    def poor(problem: PlanProblem) -> bytes:
        return pack_answer(replace(problem, strategy="page-all").solved())

    others = Others(poor)
    result, report, here = planned(others)
    assert result.plan == own() and here == 1 and others.accused == []
    assert report == ["a plan of attic was rejected: a quick plan made here costs less"]


@pytest.mark.slow
def test_a_plan_that_is_shared_is_taken_by_the_next_and_a_wrong_one_is_not() -> None:
    others = Others(honest)
    first, _, _ = planned(others, shares=True)
    ((key, content),) = others.contents.items()
    assert key[0] is Topic.PLAN
    second, report, here = planned(others, shares=True, solves=False)
    assert second.plan == first.plan and here == 0 and report == ["a plan of attic for the same step and budget"]
    assert others.asked == 1
    others.contents[key] = content[: len(content) // 2]
    third, report, here = planned(others, shares=True, solves=False)
    assert third.plan == own() and here == 1 and len(others.accused) == 1
    assert others.contents[key] != content[: len(content) // 2], "one's own is shared in return"


def test_a_step_that_is_not_searched_is_planned_here() -> None:
    graph, costs = captured()
    problem_of = partial(plan_problem, strategy="greedy", time_limit_s=4.0, limits=NO_LIMITS)
    others = Others(honest)
    peers = PeerPlans(others, shares=True, solves=True)
    result = peers.planner(lambda g, c, ram: problem_of(g, c, ram).solved(), problem_of)(graph, costs, budget(0.4))
    assert result.plan is not None and others.asked == 0 and others.contents == {}
    assert peers.report() == ["planned here by the quick planner: a step of 211 operators is too large to search"]


@pytest.mark.slow
def test_who_says_nothing_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_plans, "_PROMPT_S", -1.0)
    graph, costs = captured()
    problem_of = partial(plan_problem, strategy="milp", time_limit_s=1.0, limits=NO_LIMITS)
    others = Others()
    peers = PeerPlans(others, shares=True, solves=False)
    planner = peers.planner(lambda g, c, ram: replace(problem_of(g, c, ram), strategy="greedy").solved(), problem_of)
    for ram in (budget(0.4), budget(0.4)):
        planner(graph, costs, ram)
    assert peers.report() == ["peers are no longer asked for plans: attic: it has no such plan"], (
        "the second was there to be asked for"
    )


def test_a_problem_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_plans, "QUESTION_LIMIT_BYTES", 100)
    others = Others(honest)
    result, report, here = planned(others)
    assert result.plan == own() and here == 1 and others.asked == 0 and "more than the 100 B" in report[0]
    assert QUESTION_LIMIT_BYTES == 1 << 20
