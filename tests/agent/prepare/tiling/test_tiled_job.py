"""What a plan of a job in tiles costs, if there is one."""

import pytest

from port_agent.prepare.tiling.tiled_job import TiledJob, cost_of_plan, main_step
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.search.floor import floor_of
from port_planner.search.plan_step import base_joules
from tests.agent.prepare.tiling.small_jobs import GREEDY, whole
from tests.planner.steps import costs_of


@pytest.mark.slow
def test_a_plan_that_moves_nothing_costs_what_its_operators_do_and_one_below_the_floor_is_none() -> None:
    tiled = TiledJob(*whole(), ())
    device = costs_of(tiled.captured.graphs["step"], base=1 << 20).device
    graph, costs = main_step(tiled, device)
    kept = cost_of_plan(tiled, device, lower(graph, costs, Plan(), check_budget=False).peak_bytes, GREEDY)
    assert kept is not None and kept.keeps_everything and kept.joules == base_joules(costs)
    floor = floor_of(graph, costs).nbytes
    tight = cost_of_plan(tiled, device, floor + 1000, GREEDY)
    assert tight is not None and not tight.keeps_everything and tight.joules > kept.joules
    assert cost_of_plan(tiled, device, floor - 1, GREEDY) is None
