"""Replacing the plans of a bundle gives the file that writing it anew with these plans would give, byte for byte."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner import make_bundle
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import BundleError
from port_planner.ir.bundle.writer import replace_plans
from port_planner.ir.costs import CostTable
from port_planner.ir.plan import Plan
from port_planner.job import TrainingJob
from port_planner.search.plan_step import plan_step
from tests.planner.bundles import read_everything
from tests.planner.steps import costs_of


@pytest.fixture(scope="module")
def captured() -> make_bundle.CapturedJob:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.randn(16, 64), torch.randint(0, 10, (16,))]
    loss = lambda m, x, y: functional.cross_entropy(m(x), y)  # noqa: E731
    return make_bundle.prepare(TrainingJob(model, loss, optimizer, data, 8))


def choices(captured: make_bundle.CapturedJob, count: int) -> tuple[list[dict[str, Plan]], dict[str, CostTable]]:
    """Return `count` times the same plan, and its costs."""
    graph = captured.graphs["step"]
    costs = costs_of(graph)
    plan = plan_step(graph, costs, ram_bytes=64 << 20, strategy="greedy").plan
    assert plan is not None
    return [{"step": plan}] * count, {"step": costs}


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1), (2, 2)])
def test_replaced_plans_are_those_of_a_bundle_written_anew(
    captured: make_bundle.CapturedJob, tmp_path: Path, first: int, second: int
) -> None:
    changed, anew = tmp_path / "changed.port", tmp_path / "anew.port"
    plans, costs = choices(captured, first)
    make_bundle.write(changed, captured, plans, costs, [64 << 20] * first, threads=1)
    plans, costs = choices(captured, second)
    manifest = make_bundle.write(anew, captured, plans, costs, [64 << 20] * second, threads=1)
    replace_plans(changed, manifest, plans, costs)
    assert changed.read_bytes() == anew.read_bytes()
    assert len(Bundle(changed).plans) == second
    read_everything(Bundle(changed))


def test_a_file_that_is_no_bundle_is_refused(captured: make_bundle.CapturedJob, tmp_path: Path) -> None:
    plans, costs = choices(captured, 1)
    manifest = make_bundle.write(tmp_path / "job.port", captured, plans, costs, [64 << 20], threads=1)
    (tmp_path / "text").write_text("not a valid bundle")
    with pytest.raises(BundleError):
        replace_plans(tmp_path / "text", manifest, plans, costs)
