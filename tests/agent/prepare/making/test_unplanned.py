"""Memory that a trial finds beside its plan is reserved in each pool."""

from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.prepare.measurement.dry_run import DryRun
from port_agent.prepare.pools import with_host_headroom
from port_planner.ir.bundle.bundle import Bundle
from port_planner.make_bundle import InfeasibleError
from tests.agent.prepare.making.small_bundles import HOST, MIB, fake_trials, shallow, small_made
from tests.planner.steps import costs_of


def test_two_pools_are_each_corrected_by_their_own_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full device is reserved more of for gaps; the host's unplanned bytes are taken off the room for pages."""
    captured = shallow()
    costs = costs_of(captured.graphs["step"])
    device = with_host_headroom(
        replace(costs.device, base_bytes=MIB, scratch_targets=(HOST,), host_base_bytes=20 * MIB), 64 * MIB
    )
    seen: list[tuple[int, int]] = []

    def dry_run(bundle_file: Path, *_: object, **__: object) -> DryRun:
        found = Bundle(bundle_file)
        planned, here = found.manifest.plans[0], found.costs["step"].device
        seen.append((here.base_bytes, here.host_base_bytes))
        assert here.host is not None and here.host.capacity_bytes == 64 * MIB - here.host_base_bytes
        assert (planned.ram_bytes, planned.device_ram_bytes) == (64 * MIB, 4 * MIB)
        tries = len(seen)
        if tries == 1:
            return DryRun(30 * MIB, device_full=True)
        host = planned.peak_bytes + (10 * MIB if tries == 2 else 0)
        return DryRun(host, device_peak_bytes=planned.device_peak_bytes + (MIB // 2 if tries == 3 else 0))

    fake_trials(monkeypatch, dry_run)
    path = tmp_path / "job.port"
    found = small_made(path, captured, 64 * MIB, device=device, device_bytes=4 * MIB)
    quarter = 4 * MIB // 16
    assert seen == [
        (MIB, 20 * MIB),
        (MIB + quarter, 20 * MIB),
        (MIB + quarter, 30 * MIB),
        (MIB + quarter + MIB // 2, 30 * MIB),
    ]
    first = found.manifest.plans[0]
    assert (found.measured_peak_bytes, found.measured_device_bytes) == (first.peak_bytes, first.device_peak_bytes)
    assert {plan.ram_bytes for plan in found.manifest.plans} == {64 * MIB}


def test_a_device_that_stays_full_is_said_with_its_own_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = shallow()
    costs = costs_of(captured.graphs["step"])
    device = with_host_headroom(replace(costs.device, scratch_targets=(HOST,)), 64 * MIB)
    fake_trials(monkeypatch, lambda *_, **__: DryRun(MIB, device_full=True))
    with pytest.raises(InfeasibleError, match=r"within 4\.0 MiB.*raise --gpu-ram to at least 4301K"):
        small_made(tmp_path / "job.port", captured, 64 * MIB, device=device, device_bytes=4 * MIB)
