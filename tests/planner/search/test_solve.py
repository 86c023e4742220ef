"""The solver against brute force, and the properties every schedule has."""

from dataclasses import replace

import pytest

from port_planner.problem.problem import (
    GapDecision,
    Paging,
    Problem,
    Schedule,
    Semantics,
    Stage,
    Tensor,
    verify_problem,
)
from port_planner.search.solve import Outcome, Solution, solve
from tests.planner.brute_force import (
    beside_host_memory,
    cheapest,
    packed_pairs,
    random_problem,
    with_a_weight,
    with_variants,
)


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("block", range(10))
def test_the_optimum_equals_brute_force(block: int) -> None:
    tried = 0
    for seed in range(22 * block, 22 * block + 22):
        problem = random_problem(seed)
        verify_problem(problem)
        best, complete = cheapest(problem, most=3000)
        if complete:
            tried += 1
            _compare(solve(problem, time_limit_s=10), best, seed)
    assert tried >= 20


@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_equals_brute_force_with_real_transfers_and_packing(seed: int) -> None:
    problem = random_problem(seed, semantics=Semantics.REAL, packing=True)
    best, complete = cheapest(problem, most=3000)
    if complete:
        _compare(solve(problem, time_limit_s=10), best, seed)


@pytest.mark.slow
def test_what_is_packed_and_paged_is_what_brute_force_packs_and_pages() -> None:
    away = 0
    for seed in range(60):
        problem = packed_pairs(seed)
        best, complete = cheapest(problem)
        found = solve(problem, time_limit_s=10)
        assert complete
        _compare(found, best, seed)
        quick = solve(problem, strategy="greedy")
        assert quick.evaluation is None or quick.evaluation.valid
        away += any(c.decision is GapDecision.PACK_PAGE for c in found.schedule.choices) if found.schedule else 0
    assert away >= 10


def test_packing_never_makes_the_quick_answer_dearer() -> None:
    for seed in range(40):
        problem = random_problem(seed, semantics=Semantics.REAL, packing=True)
        bare = replace(problem, tensors=tuple(replace(tensor, packings=()) for tensor in problem.tensors))
        found, without = (solve(p, strategy="greedy").overhead_joules for p in (problem, bare))
        assert without is None or (found is not None and found <= without * (1 + 1e-9))


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("semantics", [Semantics.POET, Semantics.REAL])
@pytest.mark.parametrize("block", range(4))
def test_with_two_pools_and_three_levels_the_optimum_equals_brute_force(block: int, semantics: Semantics) -> None:
    """Device, host memory of a few bytes, flash: each link with a clock of its own."""
    tried = 0
    for seed in range(15 * block, 15 * block + 15):
        problem = beside_host_memory(random_problem(seed, semantics=semantics), seed)
        best, complete = cheapest(problem, most=3000)
        if complete:
            tried += 1
            _compare(solve(problem, time_limit_s=10), best, seed)
    assert tried >= 4


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("copied", [False, True])
def test_with_two_pools_and_a_weight_that_is_paged_the_optimum_equals_brute_force(copied: bool) -> None:
    """What lives within the step may go to the host's memory or to flash; a weight to flash, around the step's end too,
    or, `copied`, to the host's memory, which has it all the time then and flash never.
    """
    tried = wrapped = at_host = 0
    for seed in range(60):
        problem = with_a_weight(beside_host_memory(random_problem(seed), seed), seed, copied=copied)
        verify_problem(problem)
        best, complete = cheapest(problem, most=3000)
        if complete:
            tried += 1
            found = solve(problem, time_limit_s=10)
            _compare(found, best, seed)
            choices = found.schedule.choices if found.schedule else ()
            around = [c for c in choices if problem.gaps[c.gap].before >= problem.size]
            wrapped += bool(around)
            at_host += any(c.target == 1 for c in around)
            quick = solve(problem, strategy="greedy")
            assert quick.evaluation is None or quick.evaluation.valid, seed
    assert tried >= 40 and wrapped >= 5 and (at_host >= 3) == copied


@pytest.mark.slow
@pytest.mark.parametrize("semantics", [Semantics.POET, Semantics.REAL])
def test_with_groups_of_stages_that_have_alternatives_the_optimum_equals_brute_force(semantics: Semantics) -> None:
    _compare_with_alternatives(semantics, range(14), 0)


@pytest.mark.long
@pytest.mark.parametrize("semantics", [Semantics.POET, Semantics.REAL])
def test_with_alternatives_of_many_kinds_the_optimum_equals_brute_force(semantics: Semantics) -> None:
    _compare_with_alternatives(semantics, range(14, 80), 6)


def _compare_with_alternatives(semantics: Semantics, seeds: range, least: int) -> None:
    """A chain whole or in tiles, of which what is in tiles depends on the gaps around it; and another kernel."""
    tried = in_tiles = held = 0
    for seed in seeds:
        problem = with_variants(random_problem(seed, semantics=semantics, packing=semantics is Semantics.REAL), seed)
        verify_problem(problem)
        best, complete = cheapest(problem, most=6000)
        if complete:
            tried += 1
            found = solve(problem, time_limit_s=10)
            _compare(found, best, seed)
            chosen = dict(found.schedule.variants) if found.schedule else {}
            in_tiles += 0 in chosen
            held += 0 in chosen and any(s.gaps for s in problem.groups[0].alternatives[chosen[0]].savings)
    assert tried >= 4 and in_tiles >= 1 and held >= least


def test_the_hosts_memory_is_a_limit_of_its_own() -> None:
    costlier = 0
    for seed in range(12):
        problem = beside_host_memory(random_problem(seed), seed)
        bounded, boundless = (
            solve(replace(problem, target_bytes=(None, room))).overhead_joules for room in (0, 1 << 40)
        )
        costlier += boundless is not None and (bounded is None or boundless < bounded - 1e-9)
    assert costlier >= 3


def test_with_all_the_hosts_memory_and_a_free_link_the_plan_is_that_of_one_pool() -> None:
    """What the device has too little of, the host has: but for its pages, nothing is decided
    otherwise, and nothing is lost.
    """
    moved = 0
    for seed in range(20):
        problem = beside_host_memory(random_problem(seed, semantics=Semantics.ELASTIC), seed)
        free = tuple(_dearer_than_the_link(t) for t in problem.tensors)
        endless = replace(problem, tensors=free, target_bytes=(None, 1 << 40), deadline_s=None, write_limit_bytes=None)
        split, together = solve(endless), solve(replace(endless, ram_bytes=1 << 40))
        assert together.schedule == Schedule()
        if split.schedule is not None:
            assert _without_host_pages(split.schedule) == together.schedule, seed
            assert split.overhead_joules == pytest.approx(0.0, abs=1e-9), seed
            assert split.evaluation is not None and split.evaluation.stall_seconds == 0.0
            moved += split.schedule != together.schedule
    assert moved >= 5


def _dearer_than_the_link(tensor: Tensor) -> Tensor:
    """Return the tensor with a free link to the host, and no rematerialization that is free, too."""
    again = tuple(r and replace(r, joules=r.joules + 1.0) for r in tensor.rematerializations)
    return replace(tensor, rematerializations=again, paging=(*tensor.paging[:-1], Paging(1, 0.0, 0.0, 0.0, 0.0)))


def _without_host_pages(schedule: Schedule) -> Schedule:
    kept = tuple(c for c in schedule.choices if (c.decision, c.target) != (GapDecision.PAGE, 1))
    return replace(schedule, choices=kept)


def _compare(solution: Solution, best: float | None, seed: int) -> None:
    if best is None:
        assert solution.outcome is Outcome.INFEASIBLE, seed
        return
    assert solution.outcome is Outcome.OPTIMAL, seed
    assert solution.overhead_joules == pytest.approx(best, abs=1e-6, rel=2e-4), seed
    assert solution.bound_joules is not None and solution.bound_joules <= best + 1e-6, seed


def test_solving_twice_gives_the_same() -> None:
    problem = random_problem(17)
    assert solve(problem).schedule == solve(problem).schedule


def test_progress_shows_incumbent_above_bound() -> None:
    seen: list[tuple[float, float]] = []
    problem = next(p for p in map(random_problem, range(100)) if (solve(p).overhead_joules or 0) > 0)
    solve(problem, progress=lambda incumbent, bound: seen.append((incumbent, bound)))
    assert seen and all(bound <= incumbent + 1e-9 for incumbent, bound in seen)


def _roomy(seed: int) -> Problem:
    problem = random_problem(seed)
    return replace(problem, ram_bytes=None, deadline_s=None, write_limit_bytes=None)


def test_without_a_budget_nothing_is_done() -> None:
    solution = solve(_roomy(3))
    assert solution.outcome is Outcome.OPTIMAL and solution.schedule == Schedule()
    assert solution.overhead_joules == 0


def test_a_budget_below_the_working_set_is_infeasible_and_says_so() -> None:
    problem = replace(_roomy(5), ram_bytes=1)
    solution = solve(problem)
    assert solution.outcome is Outcome.INFEASIBLE and solution.schedule is None
    assert solution.needed_bytes is not None and solution.needed_bytes > 1
    assert "raise --ram" in solution.message


def test_wear_limit_binds() -> None:
    problem = next(p for p in (replace(random_problem(k), write_limit_bytes=None) for k in range(200)) if _pages(p))
    limited = replace(problem, write_limit_bytes=0.0)
    solution = solve(limited)
    assert solution.evaluation is None or solution.evaluation.written_bytes == 0
    free = solve(problem)
    assert free.overhead_joules is not None
    assert solution.overhead_joules is None or solution.overhead_joules >= free.overhead_joules - 1e-9


def _pages(problem: Problem) -> bool:
    found = solve(problem).evaluation
    return found is not None and found.written_bytes > 0


def test_of_two_paging_targets_the_better_is_taken() -> None:
    """zram costs little but keeps bytes in RAM; flash is expensive and keeps none: which is
    better depends on the budget.
    """
    stages = tuple(Stage(f"s{t}", 1.0, 1.0) for t in range(6))
    zram = Paging(1, 0.1, 0.1, 1.0, 1.0, stored_bytes=4)
    flash = Paging(0, 0.1, 0.1, 5.0, 5.0)
    idle = Tensor("idle", 10, (0, 5), (0,), rematerializations=(None,), paging=(flash, zram))
    busy = Tensor("busy", 10, (2, 3), (2,), rematerializations=(None,))
    roomy = Problem(stages, (idle, busy), ram_bytes=14, targets=("flash", "zram"))
    for problem, joules, target in ((roomy, 2.0, 1), (replace(roomy, ram_bytes=13), 10.0, 0)):
        solution = solve(problem)
        assert solution.outcome is Outcome.OPTIMAL and solution.overhead_joules == pytest.approx(joules)
        assert solution.schedule is not None and [c.target for c in solution.schedule.choices] == [target]
