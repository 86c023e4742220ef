"""An infeasible model names the limits that it misses; with these moved by as much, it has a solution."""

from dataclasses import replace

import pytest

from port_planner.milp.conflict import Limit, shortfalls
from port_planner.milp.highs import HighsSession, LinearModel, SolverStatus
from port_planner.milp.milp_model import Formulation
from port_planner.problem.coarsen import coarsen
from port_planner.problem.problem import Semantics
from port_planner.search.anytime import SMALLEST
from port_planner.search.solve import Outcome, solve
from tests.planner.brute_force import random_problem
from tests.planner.steps import costs_of, tiny_step


def tightened(seed: int, ram: float, time: float) -> Formulation:
    problem = random_problem(seed, semantics=Semantics.REAL)
    tight = replace(problem, ram_bytes=round((problem.ram_bytes or 0) * ram), deadline_s=problem.base_seconds * time)
    return Formulation(tight, SMALLEST)


def relaxation(model: LinearModel) -> SolverStatus:
    return HighsSession(model, relaxed=True).run(10.0).status


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("ram", "time"), [(0.3, 3.0), (1.0, 0.5), (0.5, 0.9)])
def test_the_rows_named_are_those_to_move(seed: int, ram: float, time: float) -> None:
    formulation = tightened(seed, ram, time)
    model = formulation.model
    found = {s.row: s for s in shortfalls(formulation, 10.0)}
    if relaxation(model) is not SolverStatus.INFEASIBLE:
        assert not found
        return
    assert found
    for name, missed in found.items():
        if name in model.impossible:
            model.impossible.pop(name)
            continue
        scale = formulation.second_scale if missed.limit is Limit.DEADLINE else formulation.byte_scale
        model.row_upper[model.row_names.index(name)] += missed.amount / scale + 1e-6
    assert relaxation(model) is not SolverStatus.INFEASIBLE


def test_an_infeasible_step_names_the_row_and_the_bytes() -> None:
    graph = tiny_step().graphs["step"]
    costs = costs_of(graph)
    problem = coarsen(graph, costs, ram_bytes=4_000).problem
    solution = solve(problem, time_limit_s=5.0)
    assert solution.outcome is Outcome.INFEASIBLE
    assert "the model misses eq6_memory_after(" in solution.message
    worst = shortfalls(Formulation(problem, SMALLEST), 5.0)[0]
    assert str(worst) in solution.message


def test_a_deadline_below_the_step_itself_is_named() -> None:
    problem = random_problem(3)
    solution = solve(replace(problem, deadline_s=problem.base_seconds - 1.0), time_limit_s=5.0)
    assert solution.outcome is Outcome.INFEASIBLE
    assert [s.row for s in solution.missed] == ["eq8_deadline"]
    assert solution.missed[0].amount == pytest.approx(1.0)
