"""What a trial step teaches about costs."""

from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.prepare.measurement.dry_run import DryRun
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.costs import OpCost
from port_planner.profiling.operator_profile import MeasuredCosts
from tests.agent.prepare.making.small_bundles import SEEN, fake_trials, shallow, small_made
from tests.planner.steps import costs_of


def test_measured_at_a_pace_takes_longer_and_more_energy_but_no_more_memory() -> None:
    measured = MeasuredCosts(((OpCost(1.0, 64, 4.0), OpCost(0.0, 0, 0.0)),), 10, 1)
    assert measured.at_pace(1.5) == MeasuredCosts(((OpCost(1.5, 64, 6.0), OpCost(0.0, 0, 0.0)),), 10, 1)


@pytest.mark.parametrize(("pace", "believed"), [(1.3, 1.3), (0.8, 0.8), (3.0, 1.0)])
def test_a_bundle_is_priced_at_the_pace_of_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pace: float, believed: float
) -> None:
    captured = shallow()
    costs = costs_of(captured.graphs["step"])
    peak = 64 << 20
    fake_trials(monkeypatch, lambda *_, **__: DryRun(peak, pace=pace))
    for estimated in (False, True):
        path = tmp_path / f"{estimated}.port"
        small_made(path, captured, 2 * peak, estimated=estimated)
        factor = 1.0 if estimated else believed
        assert [c.seconds for c in Bundle(path).costs["step"].ops] == pytest.approx(
            [c.seconds * factor for c in costs.ops]
        )


@pytest.mark.parametrize(("estimated", "slower"), [(False, 1.0), (True, 4.0)])
def test_what_the_first_trial_sees_of_packing_is_priced_for_the_plans_that_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimated: bool, slower: float
) -> None:
    """The seconds of a board that is not at hand are as much longer as its operators' are."""
    captured = shallow()
    costs, probed = costs_of(captured.graphs["step"]), list[bool]()

    def dry_run(*_: object, probe_packing: bool, **__: object) -> DryRun:
        probed.append(probe_packing)
        return DryRun(1 << 20, pace=1 / slower, packings={"step": (SEEN,)} if probe_packing else {})

    fake_trials(monkeypatch, dry_run)
    path = tmp_path / "job.port"
    small_made(path, captured, 64 << 20, estimated=estimated)
    assert probed[0] and not any(probed[1:])
    (found,) = Bundle(path).costs["step"].packings
    assert (found.pack_seconds, found.unpack_seconds) == pytest.approx((slower * 1e-3, slower * 3e-3))
    assert found.joules == pytest.approx(found.seconds * costs.device.compute_watts)
    assert replace(found, pack_seconds=1e-3, unpack_seconds=3e-3, joules=0.0) == SEEN
