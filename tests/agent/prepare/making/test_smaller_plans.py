"""Plans for smaller budgets beside the first, and in its place."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.prepare.measurement.dry_run import DryRun
from port_planner import make_bundle
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import Manifest, PlannedLimits
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from tests.agent.prepare.making.small_bundles import deep, fake_trials, greedy, small_made
from tests.planner.steps import costs_of


@pytest.mark.slow
@pytest.mark.parametrize("unplanned", [0, 1 << 22])
def test_the_first_plan_costs_no_more_than_those_for_smaller_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unplanned: int
) -> None:
    """Each of them is a plan for the whole budget, too: one that takes in its trial what was
    planned is the first then.
    """
    captured = deep()
    costs = costs_of(captured.graphs["step"])
    budget = int(0.8 * lower(captured.graphs["step"], costs, Plan()).peak_bytes)
    ran: list[Plan] = []

    def dry_run(bundle_file: Path, *_: object, meanwhile: Callable[[], None], **__: object) -> DryRun:
        ran.append(Bundle(bundle_file).plans[0]["step"])
        meanwhile()
        more = 0 if len(ran) <= 2 else unplanned
        return DryRun(Bundle(bundle_file).manifest.plans[0].peak_bytes + more)

    fake_trials(monkeypatch, dry_run)
    expensive = make_bundle.default_planner(strategy="page-all", time_limit_s=1.0)
    made = small_made(tmp_path / "job.port", captured, budget, planner=expensive)
    first, *smaller = made.manifest.plans
    costlier = [plan for plan in smaller if plan.overhead_joules < first.overhead_joules]
    assert ran[1].strategy == "page-all" and len(ran) == 3
    if unplanned:
        assert first.strategy == "page-all" and costlier, "no trial showed that the others take what they say"
    else:
        assert first.strategy == "greedy" and not costlier
    assert Bundle(tmp_path / "job.port").plans[0]["step"].decisions == ran[1 if unplanned else 2].decisions
    assert first.ram_bytes == budget


@pytest.mark.slow
def test_a_bundle_keeps_its_limits_and_its_smaller_plans_keep_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = deep()
    fake_trials(monkeypatch, lambda bundle_file, *_, **__: DryRun(Bundle(bundle_file).manifest.plans[0].peak_bytes))

    def made(limits: PlannedLimits, planner_limits: PlannedLimits) -> Manifest:
        planner = greedy(planner_limits)
        return small_made(tmp_path / "job.port", captured, 1 << 23, limits=limits, wide=True, planner=planner).manifest

    limits = PlannedLimits(step_s=1e9, written_bytes=0, deadline_at=4e9, charging=("22:00", "07:00"))
    kept = made(limits, limits)
    assert kept.limits == Bundle(tmp_path / "job.port").manifest.limits == limits
    assert len(kept.plans) > 1 and all(plan.written_bytes == 0 for plan in kept.plans)
    late = made(replace(limits, step_s=1e-12), replace(limits, step_s=None))
    assert len(late.plans) == len(kept.plans), "late is better than not at all"
