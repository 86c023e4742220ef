"""A bundle that is made is whole; one that is not leaves what was there."""

from pathlib import Path

import pytest

from port_agent.prepare.making import refinement
from port_agent.prepare.measurement.dry_run import DryRun
from port_planner.ir.bundle.bundle import Bundle
from port_planner.make_bundle import InfeasibleError
from tests.agent.prepare.making.small_bundles import fake_trials, shallow, small_made
from tests.planner.steps import costs_of


@pytest.mark.parametrize(("unplanned", "leaves_room"), [(900 << 10, True), (1 << 40, False)])
def test_a_refusal_says_what_a_trial_found_beside_the_step_if_that_leaves_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unplanned: int, leaves_room: bool
) -> None:
    prepared = shallow()
    costs = costs_of(prepared.graphs["step"])
    monkeypatch.setattr(refinement, "loading_peak", lambda: 0)
    fake_trials(
        monkeypatch, lambda bundle_file, *_, **__: DryRun(Bundle(bundle_file).manifest.plans[0].peak_bytes + unplanned)
    )
    with pytest.raises(InfeasibleError) as refused:
        small_made(tmp_path / "job.port", prepared, 1 << 20)
    assert refused.value.base_bytes == (costs.device.base_bytes + unplanned if leaves_room else None)


@pytest.mark.process
def test_a_bundle_that_was_there_stays_where_no_plan_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.port"
    path.write_bytes(b"made before")
    fake_trials(monkeypatch, lambda *_, **__: DryRun(1 << 40))
    with pytest.raises(InfeasibleError):
        small_made(path, shallow(), 1 << 20)
    assert path.read_bytes() == b"made before"
    assert [p.name for p in tmp_path.iterdir()] == ["job.port"]
