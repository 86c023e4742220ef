"""Planning problems as data: the same plan from them, nothing of the model's names, and no wrong plan believed."""

import random
import zlib
from dataclasses import replace

import msgspec
import pytest

from port_planner.base.errors import PortError
from port_planner.ir.bundle.codec import WireError
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.search.plan_problem import (
    MAX_ANSWER_BYTES,
    MAX_RAW_BYTES,
    PlanProblem,
    UnsuitedPlanError,
    WrongPlanError,
    judged,
    pack_answer,
    pack_problem,
    plan_in,
    unpack_problem,
)
from tests.planner.estimated_steps import budget, captured


def problem(strategy: str = "greedy") -> PlanProblem:
    graph, costs = captured()
    return PlanProblem(graph, costs, budget(0.4), time_limit_s=5.0, strategy=strategy)


def solved(asked: PlanProblem) -> Plan:
    plan = plan_in(pack_answer(asked.solved()))
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["greedy", "milp"])
def test_the_same_plan_from_the_problem_as_it_is_sent(strategy: str) -> None:
    asked = problem(strategy)
    here, there = asked.solved().plan, solved(unpack_problem(pack_problem(asked)))
    assert here is not None and there == here
    assert judged(asked, there, same_costs=True) == replace(here, bound_joules=None)


def test_a_problem_has_no_names_of_the_model_nor_of_the_device() -> None:
    asked = problem()
    raw = zlib.decompress(pack_problem(asked))
    names = {s.name for s in asked.graph.storages if s.name} | {asked.costs.device.name}
    assert len(names) > 20 and not any(name.encode() in raw for name in names)


def test_the_name_is_of_step_and_limits_and_not_of_costs() -> None:
    asked = problem()
    costlier = replace(asked.costs, ops=tuple(replace(op, seconds=2 * op.seconds) for op in asked.costs.ops))
    assert unpack_problem(pack_problem(asked)).name == asked.name == replace(asked, costs=costlier).name
    others = [
        replace(asked, ram_bytes=asked.ram_bytes + 1),
        replace(asked, deadline_s=9.0),
        replace(asked, write_limit_bytes=1),
        replace(asked, time_limit_s=6.0),
        replace(asked, strategy="milp"),
        replace(asked, graph=replace(asked.graph, aux=(*asked.graph.aux, asked.graph.loss))),
    ]
    assert len({asked.name, *(other.name for other in others)}) == len(others) + 1


def test_why_there_is_no_plan() -> None:
    asked = replace(problem(), ram_bytes=1 << 20)
    reason = plan_in(pack_answer(asked.solved()))
    assert isinstance(reason, str) and reason.startswith("no plan fits 1.0 MiB: op ")


def test_a_plan_that_is_not_what_it_says_is_wrong() -> None:
    asked = problem()
    plan = solved(asked)
    for figure in ("peak_bytes", "seconds", "joules", "overhead_joules"):
        lie = replace(plan, **{figure: type(getattr(plan, figure))(1.01 * getattr(plan, figure) + 1)})
        with pytest.raises(WrongPlanError, match=f"claims {figure}"):
            judged(asked, lie, same_costs=True)
    assert judged(asked, replace(plan, bound_joules=0.0), same_costs=True).bound_joules is None
    with pytest.raises(WrongPlanError, match="does not fit"):
        judged(asked, Plan(), same_costs=True)
    broken = Decision(len(asked.graph.storages) + 7, 0, 1, Action.PAGE)
    for same_costs in (True, False):
        with pytest.raises(WrongPlanError, match="not valid for this step"):
            judged(asked, replace(plan, decisions=(*plan.decisions, broken)), same_costs=same_costs)
    hurried = replace(asked, deadline_s=0.5 * plan.seconds)
    with pytest.raises(WrongPlanError, match="exceeds the limits"):
        judged(hurried, plan, same_costs=True)


def test_a_plan_for_other_costs_gets_its_figures_here_or_is_unsuited() -> None:
    asked = problem()
    plan = solved(asked)
    costlier = replace(asked.costs, ops=tuple(replace(op, seconds=2 * op.seconds) for op in asked.costs.ops))
    assert judged(replace(asked, costs=costlier), plan, same_costs=False).seconds > plan.seconds
    fuller = replace(asked.costs, device=replace(asked.costs.device, base_bytes=asked.ram_bytes - 1))
    with pytest.raises(UnsuitedPlanError, match="does not fit"):
        judged(replace(asked, costs=fuller), plan, same_costs=False)


def test_what_is_no_answer() -> None:
    whole = pack_answer(problem().solved())
    for content in (b"", b"\x80\x04K\x01.", whole[:-1], whole + b"\0", b"x" * (MAX_ANSWER_BYTES + 1), b"\x91" * 9999):
        with pytest.raises(WrongPlanError):
            plan_in(content)


@pytest.mark.slow
def test_what_is_no_problem() -> None:
    asked = problem()
    whole = pack_problem(asked)
    record = msgspec.msgpack.decode(zlib.decompress(whole))
    later = zlib.compress(msgspec.msgpack.encode([3, *record[1:]]))
    fewer = zlib.compress(msgspec.msgpack.encode([*record[:2], [*record[2][:2], record[2][2][1:]], *record[3:]]))
    bomb = zlib.compress(bytes(MAX_RAW_BYTES + 1), 9)
    for content, words in (
        (b"", "truncated"),
        (whole[:-5], "truncated"),
        (whole + b"1", "bytes after its end"),
        (b"no zlib", "not a planning problem"),
        (bomb, "more than"),
        (later, "format 3, but this agent reads 2"),
        (fewer, "costs for"),
        (zlib.compress(b"\xc1"), "not a planning problem"),
    ):
        with pytest.raises(WireError, match=words):
            unpack_problem(content)


@pytest.mark.slow
@pytest.mark.parametrize("count", [400, pytest.param(3000, marks=pytest.mark.long)])
def test_fuzzed_problems_and_answers_are_read_or_refused(count: int) -> None:
    random_ = random.Random(23)
    asked = problem()
    raw, answer = zlib.decompress(pack_problem(asked)), pack_answer(asked.solved())
    read = refused = 0
    for number in range(count):
        content = bytearray(answer if number % 2 else raw)
        for _ in range(random_.randrange(1, 4)):
            content[random_.randrange(len(content))] = random_.randrange(256)
        try:
            if number % 2:
                plan = plan_in(bytes(content))
                if isinstance(plan, Plan):
                    judged(asked, plan, same_costs=True)
            else:
                unpack_problem(zlib.compress(bytes(content), 1))
            read += 1
        except PortError:
            refused += 1
    assert read > count / 150 and refused > count / 3, (read, refused)
