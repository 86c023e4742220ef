"""A job that sums gradients gets the graph of a whole update where that moves less, and not where nothing moves."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_agent.prepare.whole_updates import merged_costs, with_whole_update
from port_planner import make_bundle
from port_planner.ir.bundle.manifest import WHOLE_UPDATE
from port_planner.ir.costs import DeviceCosts, Flash, OpCost
from port_planner.job import TrainingJob
from port_planner.make_bundle import CapturedJob
from port_planner.problem.whole_update import whole_update
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.pareto import choice_of, full_batches

WIDTH, LAYERS, BATCH, COUNT = 256, 6, 4, 4
WEIGHT = WIDTH * WIDTH * 4
DEVICE = DeviceCosts("test", 0, 1.0, 1.0, Flash("card", 45e6, 25e6, 1e-4, 1e-9, 1e-9, wear_joules_per_byte=5e-6))
QUICK = make_bundle.default_planner(strategy="greedy", time_limit_s=1.0)


def captured(count: int = COUNT) -> tuple[CapturedJob, MeasuredCosts]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(LAYERS)))
    loss = lambda model, x, y: functional.mse_loss(model(x), y)  # noqa: E731
    data = [torch.randn(4 * BATCH, WIDTH), torch.randn(4 * BATCH, WIDTH)]
    job = TrainingJob(model, loss, torch.optim.AdamW(model.parameters()), data, BATCH, accumulate=count)
    made = make_bundle.prepare(job)
    return made, MeasuredCosts(tuple(tuple(OpCost(1e-4, 0, 1e-4) for _ in g.ops) for g in made.graphs.values()), 0, 0)


@pytest.mark.slow
def test_where_weights_have_no_room_an_update_is_one_graph() -> None:
    before, measured = captured()
    after, costs = with_whole_update(before, measured, DEVICE, 10 * WEIGHT, QUICK)
    assert [*after.graphs] == [*before.graphs, WHOLE_UPDATE]
    assert len(costs.ops[-1]) == len(after.graphs[WHOLE_UPDATE].ops)
    plans, tables = make_bundle.plan_all(after, costs, DEVICE, 10 * WEIGHT, QUICK)
    said = choice_of(10 * WEIGHT, plans, after.graphs, tables, COUNT)
    plans, tables = make_bundle.plan_all(before, measured, DEVICE, 10 * WEIGHT, QUICK)
    alone = choice_of(10 * WEIGHT, plans, before.graphs, tables, COUNT)
    assert said.joules + said.wear_joules < alone.joules + alone.wear_joules, "a batch, on average"
    assert said.written_bytes < alone.written_bytes
    assert full_batches(before.graphs, COUNT) == {"first": 1, "next": COUNT - 2, "last": 1} and full_batches(
        after.graphs, COUNT
    ) == {WHOLE_UPDATE: 1}


@pytest.mark.slow
def test_it_is_not_where_all_has_room_or_each_batch_updates() -> None:
    before, measured = captured()
    assert with_whole_update(before, measured, DEVICE, 1 << 30, QUICK) == (before, measured)
    single, measured = captured(1)
    assert with_whole_update(single, measured, DEVICE, 10 * WEIGHT, QUICK) == (single, measured)


@pytest.mark.slow
def test_the_first_random_operator_has_room_for_every_draw() -> None:
    before, measured = captured()
    tables = dict(zip(before.graphs, measured.ops, strict=True))
    names = [name for name, count in full_batches(before.graphs, COUNT).items() for _ in range(count)]
    update = whole_update([before.graphs[name] for name in names], 10 * WEIGHT, remake=False)
    assert update is not None
    costs = merged_costs(update, [[replace(c, seconds=1e-3 * m) for c in tables[n]] for m, n in enumerate(names)])
    assert all(cost.seconds == 1e-3 * m for cost, (m, _) in zip(costs, update.origin, strict=True))
    roomy = [i for i, cost in enumerate(costs) if cost.workspace_bytes]
    assert roomy == [min(i for together in update.graph.draws for i in together)]
    assert costs[roomy[0]].workspace_bytes >= BATCH * WIDTH * 4
