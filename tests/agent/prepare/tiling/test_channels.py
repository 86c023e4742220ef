"""A batch norm's backward pass by channels, near the floor that it sets."""

from dataclasses import replace

import pytest

from port_agent.prepare.tiling.channels import in_channels
from port_agent.prepare.tiling.tiled_job import TiledJob
from port_planner import make_bundle
from port_planner.ir.costs import CostTable
from port_planner.job import TrainingJob
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.floor import floor_of
from port_planner.tiling.gradients import split_gradients
from port_planner.tiling.norms import NORM_BACKWARD
from port_planner.tiling.rewriting import compacted
from tests.agent.exactness import OPTIMIZERS
from tests.agent.prepare.tiling.small_jobs import ROOM
from tests.planner.steps import costs_of
from tests.planner.tiling.normed_step import normed, normed_batch, normed_loss


@pytest.mark.long
def test_near_the_floor_that_a_batch_norm_sets_its_backward_pass_runs_by_channels() -> None:
    model, columns = normed(), list(normed_batch(0))
    job = TrainingJob(model, normed_loss, OPTIMIZERS["sgd"](model.parameters()), columns, 4)
    captured = make_bundle.prepare(job)
    captured = replace(
        captured, graphs={name: compacted(split_gradients(graph).graph) for name, graph in captured.graphs.items()}
    )
    device = costs_of(captured.graphs["step"], base=1 << 20).device
    presplit = TiledJob(captured, MeasuredCosts(tuple(costs_of(g).ops for g in captured.graphs.values()), 0, 0), ())
    floor = floor_of(captured.graphs["step"], CostTable(device, presplit.measured.ops[0]))
    assert floor.name == NORM_BACKWARD
    (found,) = in_channels(presplit, device, floor.nbytes, ROOM, lambda *_: None)
    assert found.left_whole == ()
    assert floor_of(found.captured.graphs["step"], CostTable(device, found.measured.ops[0])).name != NORM_BACKWARD
    assert in_channels(presplit, device, 2 * floor.nbytes, ROOM, lambda *_: None) == [], "with room, nothing is copied"
