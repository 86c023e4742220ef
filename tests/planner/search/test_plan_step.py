"""Plans of captured steps: within budget and deadline, never above a rival or below the bound."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from port_planner.deadline import Pace, shortfall
from port_planner.ir.costs import CostTable, PackingCost
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.lowering.packables import packables
from port_planner.ir.plan import MIN_DECIDED_BYTES, Action, Plan
from port_planner.problem.coarsen import Coarse, coarsen
from port_planner.problem.problem import Problem
from port_planner.search import plan_step as plan_step_module
from port_planner.search import solve
from port_planner.search.anytime import relaxation_bound
from port_planner.search.baselines import BITTRAIN
from port_planner.search.floor import floor_of, paging_plan
from port_planner.search.greedy.search import Greedy, greedy, greedy_variants
from port_planner.search.heuristics import cheap_segments, pack_everything
from port_planner.search.incumbent import objective
from port_planner.search.pareto import budget_for, min_budget
from port_planner.search.plan_step import (
    PlanLimits,
    PlanResult,
    ProgramJudge,
    better_of,
    fine_bound,
    plan_step,
    plan_within,
    with_figures,
)
from port_planner.search.solve import STRATEGIES, Outcome, StrategyError
from port_planner.search.wear import SPARING_TIME
from tests.planner.estimated_steps import budget, captured
from tests.planner.steps import costs_of, wide_step


@pytest.mark.slow
def test_a_deadline_makes_the_plan_faster_or_says_by_how_much_it_cannot() -> None:
    graph, costs = captured()
    limit = budget(0.3)
    free = plan_step(graph, costs, ram_bytes=limit, strategy="greedy").plan
    assert free is not None
    least = lower(graph, costs, Plan()).seconds
    kept = plan_step(graph, costs, ram_bytes=limit, strategy="greedy", deadline_s=free.seconds * 1.01).plan
    assert kept is not None and kept.seconds <= free.seconds * 1.01
    wanted = 0.5 * (least + free.seconds)
    hurried = plan_step(graph, costs, ram_bytes=limit, time_limit_s=1.5, deadline_s=wanted)
    if hurried.plan is not None:
        assert hurried.plan.seconds <= wanted * (1 + 1e-9) and hurried.plan.peak_bytes <= limit
    else:
        assert hurried.fastest_seconds is not None and hurried.fastest_seconds > wanted


def test_a_deadline_below_the_steps_own_time_is_infeasible_with_figures() -> None:
    graph, costs = captured()
    wanted = 0.5 * lower(graph, costs, Plan()).seconds
    result = plan_step(graph, costs, ram_bytes=budget(0.5), strategy="greedy", deadline_s=wanted)
    assert result.outcome is Outcome.INFEASIBLE and result.plan is None
    assert result.fastest_seconds is not None and result.fastest_seconds > wanted
    assert "deadline leaves" in result.message and "raise --ram" in result.message


@pytest.mark.slow
def test_which_budget_would_do() -> None:
    graph, costs = captured()
    small, large = budget(0.05), budget(2.0)
    slow = plan_step(graph, costs, ram_bytes=small, strategy="greedy").plan
    least = lower(graph, costs, Plan()).seconds
    assert slow is not None and slow.seconds > least * 1.01
    enough = budget_for(graph, costs, least * 1.005, [small, large])
    assert enough == large
    text = shortfall(Pace(1000 * least * 1.005, 1000, least * 1.005), slow.seconds, "300 MiB")
    assert text is not None and "300 MiB would suffice" in text
    assert budget_for(graph, costs, least * 0.5, [small, large]) is None


@pytest.mark.slow
def test_the_best_verified_of_all_answers_is_taken() -> None:
    graph, costs = captured()
    limit = budget(0.5)
    found = plan_step(graph, costs, ram_bytes=limit, strategy="page-all")
    good = plan_step(graph, costs, ram_bytes=limit, time_limit_s=2.0).plan
    assert found.plan is not None and good is not None
    better = better_of(graph, costs, PlanLimits(limit), found=found, rivals=[good])
    assert better.plan is not None and better.plan.joules == pytest.approx(good.joules)
    broken = replace(good, decisions=good.decisions[: len(good.decisions) // 2])  # fits no longer, or breaks an input
    same = better_of(graph, costs, PlanLimits(good.peak_bytes - 1), found=better, rivals=[broken])
    assert same.plan is better.plan


def test_plans_for_somewhat_less_memory_are_rivals_in_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs = captured()
    limit, plain, found = budget(0.3), plan_step_module._coarse_plan, dict[int, float]()

    def worst_at_the_limit(request: Any, min_bytes: int) -> PlanResult:
        ram_bytes = request.limits.ram_bytes
        result = plain(replace(request, strategy="greedy"), min_bytes)
        plan = paging_plan(graph, 1, limit) if ram_bytes == limit else result.plan
        assert plan is not None
        plan = with_figures(plan, costs, lower(graph, costs, plan))
        found[ram_bytes] = plan.overhead_joules
        return replace(result, plan=plan, outcome=Outcome.FEASIBLE)

    monkeypatch.setattr(plan_step_module, "_coarse_plan", worst_at_the_limit)
    plan = plan_step(graph, costs, ram_bytes=limit, time_limit_s=100.0).plan
    base = costs.device.base_bytes
    assert [*found] == [limit, *(base + int(share * (limit - base)) for share in plan_step_module.RIVAL_SHARES)]
    assert plan is not None and plan.overhead_joules == min(found.values()) < found[limit]


@pytest.mark.slow
def test_a_bound_without_coarsening_holds() -> None:
    graph, costs = captured()
    limit = budget(0.5)
    bound = fine_bound(graph, costs, ram_bytes=limit)
    plan = plan_step(graph, costs, ram_bytes=limit, time_limit_s=1.0).plan
    coarse = coarsen(graph, costs, ram_bytes=limit).problem
    fine = coarsen(graph, costs, ram_bytes=limit, min_bytes=0).problem
    assert plan is not None and bound is not None and relaxation_bound(coarse, 10.0) is not None
    assert fine.size > coarse.size
    assert 0 < bound <= plan.overhead_joules * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenetv2", "bert"])
def test_no_program_beats_the_bound(name: str) -> None:
    graph, costs = captured(name)
    for share in (0.15, 0.6):
        limit = budget(share, name)
        coarse = coarsen(graph, costs, ram_bytes=limit)
        bound = relaxation_bound(coarse.problem, 10.0)
        assert bound is not None and bound > 0
        tried = 0
        variants = greedy_variants(coarse.problem, cheap_segments(coarse.problem))
        for schedule in itertools.islice(filter(None, variants), 12):
            judge = ProgramJudge(
                costs, coarse, limit
            )  # one that knows no cheaper program measures this one whatever it costs
            found = judge(coarse.problem, schedule)
            tried += found.valid
            assert not found.valid or objective(coarse.problem, found) >= bound * (1 - 1e-6) - 1e-12
        assert tried


def test_a_plan_that_moves_nothing_has_no_overhead_not_even_one_below_zero() -> None:
    """Sums of the same joules in another order differ in the last bit; a bundle refuses what is below zero."""
    graph, costs = captured()
    for seconds in (0.1, 0.3, 0.7, 1.1):
        ops = tuple(replace(c, seconds=c.seconds * seconds / 3, joules=c.joules * seconds / 7) for c in costs.ops)
        plan = plan_step(graph, replace(costs, ops=ops), ram_bytes=1 << 40, strategy="greedy").plan
        assert plan is not None and plan.overhead_joules >= 0.0


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("strategy", ["greedy", "milp", *(s for s in STRATEGIES if s not in ("greedy", "milp"))])
def test_every_plan_lowers_within_its_budget(strategy: str, share: float) -> None:
    graph, costs = captured()
    limit = budget(share)
    result = plan_step(graph, costs, ram_bytes=limit, strategy=strategy, time_limit_s=2.0)
    if result.plan is None:
        assert result.outcome in (Outcome.INFEASIBLE, Outcome.TIMED_OUT) and strategy not in ("greedy", "milp")
        return
    program = lower(graph, costs, result.plan)
    assert program.peak_bytes <= limit and result.plan.peak_bytes == program.peak_bytes
    assert result.bound_joules is not None
    assert result.bound_joules <= result.plan.overhead_joules * (1 + 1e-6) + 1e-9


def packed_costs() -> tuple[StepGraph, CostTable]:
    """Return a step whose activations pack to 55 %, for less than computing them again."""
    graph = wide_step()
    costs = costs_of(graph, base=5000)
    packings = tuple(
        PackingCost(p.storage, p.version, p.codec, p.item_bytes, 0.5, round(0.55 * n), n / 1e11, n / 1e11, n * 1e-12)
        for p in packables(graph, least_bytes=MIN_DECIDED_BYTES)
        for n in (graph.storages[p.storage].nbytes,)
    )
    return graph, replace(costs, packings=packings)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.6, 0.9])
def test_packing_where_it_is_cheap_takes_less_energy_than_doing_without(share: float) -> None:
    graph, costs = packed_costs()
    least, most = min_budget(graph, costs), lower(graph, costs, Plan()).peak_bytes
    limit = round(least + share * (most - least))
    packs = False
    for strategy in ("greedy", "milp"):
        found = plan_step(graph, costs, ram_bytes=limit, strategy=strategy, time_limit_s=3.0)
        without = plan_step(graph, replace(costs, packings=()), ram_bytes=limit, strategy=strategy, time_limit_s=3.0)
        assert found.plan is not None and without.plan is not None and found.bound_joules is not None
        packs |= any(d.action is Action.PACK for d in found.plan.decisions)
        assert found.plan.overhead_joules < without.plan.overhead_joules
        assert found.bound_joules <= found.plan.overhead_joules * (1 + 1e-6)
        assert lower(graph, costs, found.plan).peak_bytes == found.plan.peak_bytes <= limit
    assert packs


@pytest.mark.parametrize("seed", [13, 19, 50, 122])
def test_being_able_to_pack_never_costs_more(seed: int) -> None:
    """Prices at which packing is a trap for whoever takes the next best tensor: some cheap, some
    expensive, some that save little.
    """
    graph, costs = packed_costs()
    rng = random.Random(seed)
    packings = tuple(
        replace(
            p, reserved_bytes=round(p.reserved_bytes * rng.uniform(0.5, 1.7)), joules=p.joules * 10 ** rng.uniform(0, 4)
        )
        for p in costs.packings
    )
    costs = replace(costs, packings=packings)
    least, most = min_budget(graph, costs), lower(graph, costs, Plan()).peak_bytes
    limit = round(least + rng.uniform(0.1, 0.9) * (most - least))
    found, without = (
        plan_step(graph, table, ram_bytes=limit, strategy="greedy").plan
        for table in (costs, replace(costs, packings=()))
    )
    assert found is not None
    if without is not None:
        packing, bare = (lower(graph, costs, plan) for plan in (found, without))
        assert packing.joules <= bare.joules * (1 + 1e-9) and packing.seconds <= bare.seconds * (1 + 1e-9)
        assert packing.written_bytes <= bare.written_bytes


def test_what_greedy_search_finds_without_packing_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs = packed_costs()
    least, most = min_budget(graph, costs), lower(graph, costs, Plan()).peak_bytes
    searched = list[bool]()

    def counted(problem: Problem, *, packing: bool = True, **options: bool) -> Greedy:
        searched.append(packing and any(tensor.packings for tensor in problem.tensors))
        return greedy(problem, packing=packing, **options)

    monkeypatch.setattr(solve, "greedy", counted)
    for share in (0.6, 0.9):
        assert plan_step(graph, costs, ram_bytes=round(least + share * (most - least)), strategy="greedy").plan
    assert searched == [True, True]


def test_packing_may_take_a_little_time_to_spare_flash_that_wears_out() -> None:
    """As everything else that spares it may: plans that wrote several times as much were
    taken, as they were no slower.
    """
    graph, costs = packed_costs()
    slow = tuple(
        replace(p, pack_seconds=16 * p.pack_seconds, unpack_seconds=16 * p.unpack_seconds) for p in costs.packings
    )
    limit = round(0.1 * min_budget(graph, costs) + 0.9 * lower(graph, costs, Plan()).peak_bytes)
    programs = []
    for packings in (slow, ()):
        table = paging(replace(costs, packings=packings), 4.7e-6)
        plan = plan_step(graph, table, ram_bytes=limit, strategy="greedy").plan
        assert plan is not None
        programs.append(lower(graph, table, plan))
    packing, bare = programs
    assert packing.written_bytes < bare.written_bytes and packing.cost_joules < bare.cost_joules
    assert bare.seconds < packing.seconds <= SPARING_TIME * bare.seconds


@pytest.mark.slow
def test_the_search_with_packing_looks_within_what_a_plan_without_takes() -> None:
    """Where packing takes time, the plan of least energy takes more of it than one without: then the next
    best is wanted, not none.
    """
    graph, costs = packed_costs()
    slow = tuple(
        replace(p, pack_seconds=400 * p.pack_seconds, unpack_seconds=400 * p.unpack_seconds) for p in costs.packings
    )
    costs = replace(costs, packings=slow)
    least, most = min_budget(graph, costs), lower(graph, costs, Plan()).peak_bytes
    limit = round(least + 0.65 * (most - least))
    found = plan_step(graph, costs, ram_bytes=limit, time_limit_s=2.0)
    bare = plan_step(graph, replace(costs, packings=()), ram_bytes=limit, strategy="greedy").plan
    assert found.plan is not None and bare is not None and found.bound_joules is not None
    assert found.plan.overhead_joules < 0.749 * bare.overhead_joules, "greedy search within them comes to 0.752"
    programs = [lower(graph, costs, plan) for plan in (found.plan, bare)]
    assert programs[0].seconds <= programs[1].seconds * (1 + 1e-9)
    assert programs[0].written_bytes <= programs[1].written_bytes
    relaxed = coarsen(graph, costs, ram_bytes=limit, order=found.plan.order).problem
    assert found.bound_joules == relaxation_bound(relaxed, 5.0), "of what was asked for, not of these narrower limits"


def test_bittrain_packs_all_that_can_be_packed_and_nothing_else() -> None:
    graph, costs = packed_costs()
    plan = plan_step(graph, costs, ram_bytes=1 << 40, strategy=BITTRAIN).plan
    assert plan is not None and not plan.decisions, "with room for everything keeping is cheaper, and that is tried too"
    coarse = coarsen(graph, costs, ram_bytes=1 << 40)
    everything = coarse.plan(pack_everything(coarse.problem), 0, BITTRAIN)
    assert {d.action for d in everything.decisions} == {Action.PACK}
    assert lower(graph, costs, everything).peak_bytes < lower(graph, costs, Plan()).peak_bytes


@pytest.mark.slow
def test_ours_is_never_above_a_baseline() -> None:
    graph, costs = captured()
    limit = budget(0.5)
    ours = plan_step(graph, costs, ram_bytes=limit, time_limit_s=4.0).plan
    assert ours is not None
    for strategy in STRATEGIES:
        other = plan_step(graph, costs, ram_bytes=limit, strategy=strategy, time_limit_s=1.0).plan
        assert other is None or ours.overhead_joules <= other.overhead_joules * (1 + 1e-9) + 1e-9, strategy


def test_too_little_memory_names_the_op_and_what_it_needs() -> None:
    graph, costs = captured()
    result = plan_step(graph, costs, ram_bytes=costs.device.base_bytes + 4096, strategy="greedy")
    assert result.outcome is Outcome.INFEASIBLE and result.plan is None
    assert result.needed_bytes is not None and result.needed_op is not None and result.holders
    assert "resident" in result.message and result.remedy.startswith("lower the floor: ")


@pytest.mark.slow
@pytest.mark.parametrize("uncounted_bytes", [0, 300_000])
def test_the_budget_that_a_refusal_names_is_enough(uncounted_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where programs need more than the coarse problem counts."""
    graph, known = captured()
    costs = replace(
        known, ops=tuple(replace(c, workspace_bytes=c.workspace_bytes + uncounted_bytes) for c in known.ops)
    )

    def counting_less(graph: StepGraph, costs: CostTable, **options: Any) -> Coarse:
        return coarsen(graph, known, **options)

    monkeypatch.setattr("port_planner.search.plan_step.coarsen", counting_less)
    for ram_bytes in (costs.device.base_bytes, floor_of(graph, costs).nbytes - 1):
        refused = plan_step(graph, costs, ram_bytes=ram_bytes, strategy="greedy")
        assert refused.plan is None and refused.needed_bytes is not None
        assert plan_step(graph, costs, ram_bytes=refused.needed_bytes, strategy="greedy").plan is not None


def test_an_unknown_strategy_lists_the_known() -> None:
    graph, costs = captured()
    with pytest.raises(StrategyError, match="greedy"):
        plan_step(graph, costs, ram_bytes=1 << 40, strategy="magic")


def test_a_roomy_budget_changes_nothing() -> None:
    graph, costs = captured()
    result = plan_step(graph, costs, ram_bytes=1 << 40)
    assert result.outcome is Outcome.OPTIMAL and result.plan is not None and not result.plan.decisions


def paging(costs: CostTable, wear_joules_per_byte: float = 0.0) -> CostTable:
    """Return the costs with flash that is fast enough for careless plans to page what they could recompute."""
    flash = replace(
        costs.device.flash,
        latency_s=0.0,
        read_bytes_per_s=1e12,
        write_bytes_per_s=1e12,
        read_joules_per_byte=0.0,
        write_joules_per_byte=0.0,
        wear_joules_per_byte=wear_joules_per_byte,
        endurance_bytes=19.2e12,
    )
    return replace(costs, device=replace(costs.device, flash=flash))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.7])
def test_flash_that_wears_out_is_spared_at_little_more_time(share: float) -> None:
    graph, costs = captured()
    table = paging(costs, 4.7e-6)
    careless = plan_step(graph, paging(costs), ram_bytes=budget(share), time_limit_s=2.0).plan
    result = plan_step(graph, table, ram_bytes=budget(share), time_limit_s=2.0)
    assert careless is not None and result.plan is not None
    before, after = lower(graph, table, careless), lower(graph, table, result.plan)
    assert after.written_bytes < 0.7 * before.written_bytes
    assert after.seconds <= 1.5 * before.seconds
    assert after.wear_joules == pytest.approx(4.7e-6 * after.written_bytes)
    assert result.plan.joules == pytest.approx(after.joules), (
        "the joules that a meter sees are without the price of wear"
    )
    whole = sum(c.joules + costs.device.static_watts * c.seconds for c in costs.ops)
    assert result.plan.overhead_joules == pytest.approx(max(0.0, after.joules + after.wear_joules - whole))
    assert result.bound_joules is None or result.bound_joules <= result.plan.overhead_joules * (1 + 1e-6)


@pytest.mark.slow
def test_a_limit_of_written_bytes_is_kept_or_named() -> None:
    graph, costs = captured()
    careless = plan_step(graph, paging(costs), ram_bytes=budget(0.5), time_limit_s=2.0).plan
    assert careless is not None
    limit = lower(graph, costs, careless).written_bytes * 3 // 4
    for table in (paging(costs), paging(costs, 4.7e-6)):
        kept = plan_within(
            graph, table, PlanLimits(budget(0.5), write_limit_bytes=limit), time_limit_s=2.0, strategy="milp"
        ).plan
        assert kept is not None and lower(graph, costs, kept).written_bytes <= limit
    least = floor_of(graph, costs).nbytes
    none = plan_within(graph, paging(costs), PlanLimits(least, write_limit_bytes=0), time_limit_s=1.0, strategy="milp")
    assert none.plan is None and "--writes-per-step" in none.message
