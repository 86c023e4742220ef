"""The model offers what other searches find: a schedule that it cannot express can be neither improved nor bounded."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import capture_step
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.milp.columns import Breadth
from port_planner.milp.milp_model import Formulation
from port_planner.problem.coarsen import coarsen
from port_planner.search.greedy.search import greedy, greedy_variants
from port_planner.search.heuristics import cheap_segments, simple_schedules
from tests.planner.steps import costs_of


@pytest.mark.slow
def test_every_greedy_schedule_is_offered_also_where_the_last_update_is_of_the_first_layer() -> None:
    """The first layer's weight is on flash only between the last stage and the first: a gap with no stage inside."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(4, 1024), torch.randint(0, 16, (4,))
    graph = capture_step(model, lambda m, x, y: functional.cross_entropy(m(x), y), optimizer, batch).graphs["step"]
    costs = costs_of(graph)
    whole = lower(graph, costs, Plan()).peak_bytes
    sliced = 0
    for share in (0.7, 0.8, 0.9):
        problem = coarsen(graph, costs, ram_bytes=round(share * whole)).problem
        found = [
            greedy(problem).schedule,
            *simple_schedules(problem),
            *greedy_variants(problem, cheap_segments(problem)),
        ]
        for schedule in (s for s in found if s is not None):
            model_of = Formulation(problem, Breadth(3, 1, early_pages=False), schedule)
            assert model_of.start_values(schedule) is not None
            sliced += bool(schedule.sliced)
    assert sliced
