"""A bundle that is made is whole; one that is not leaves what was there."""

from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.prepare.making import refinement
from port_agent.prepare.measurement.dry_run import DryRun, DryRunError, DryRunWorkers
from port_planner.base.errors import ExitCode
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import ExpectedResults
from port_planner.make_bundle import InfeasibleError
from tests.agent.prepare.making.small_bundles import fake_trials, shallow, small_made
from tests.planner.steps import costs_of


@pytest.mark.slow
@pytest.mark.parametrize(("unplanned", "leaves_room"), [(900 << 10, True), (1 << 40, False)])
def test_a_refusal_says_what_a_trial_found_beside_the_step_if_that_leaves_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unplanned: int, leaves_room: bool
) -> None:
    captured = shallow()
    costs = costs_of(captured.graphs["step"])
    monkeypatch.setattr(refinement, "loading_peak", lambda: 0)
    fake_trials(
        monkeypatch, lambda bundle_file, *_, **__: DryRun(Bundle(bundle_file).manifest.plans[0].peak_bytes + unplanned)
    )
    with pytest.raises(InfeasibleError) as refused:
        small_made(tmp_path / "job.port", captured, 1 << 20)
    assert refused.value.base_bytes == (costs.device.base_bytes + unplanned if leaves_room else None)


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_a_bundle_that_was_there_stays_where_no_plan_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.port"
    path.write_bytes(b"made before")
    fake_trials(monkeypatch, lambda *_, **__: DryRun(1 << 40))
    with pytest.raises(InfeasibleError):
        small_made(path, shallow(), 1 << 20)
    assert path.read_bytes() == b"made before"
    assert [p.name for p in tmp_path.iterdir()] == ["job.port"]


@pytest.mark.parametrize("other_formulas", [(), ("aten::prod at train.py:7",)])
def test_what_its_script_does_not_bear_out_is_no_bundle(
    other_formulas: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(*_: object) -> None:
        raise DryRunError("step 3 gave the loss 1.0", ExitCode.IMPOSSIBLE)

    fake_trials(monkeypatch, lambda path, *_, **__: DryRun(Bundle(path).manifest.plans[0].peak_bytes))
    monkeypatch.setattr(DryRunWorkers, "referee", differs)
    named = ". The gradients of aten::prod at train.py:7 have another formula" if other_formulas else "$"
    with pytest.raises(DryRunError, match=f"step 3 gave the loss 1.0{named}") as refused:
        small_made(tmp_path / "job.port", replace(shallow(), other_formulas=other_formulas), 64 << 20)
    assert refused.value.exit_code == ExitCode.IMPOSSIBLE and not [*tmp_path.iterdir()]


def test_other_formulas_are_refused_where_no_script_could_be_run_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_trials(monkeypatch, lambda path, *_, **__: DryRun(Bundle(path).manifest.plans[0].peak_bytes))
    captured = replace(shallow(), other_formulas=("aten::prod",), reference=ExpectedResults(("0x1p+0",)))
    with pytest.raises(
        DryRunError, match=r"The gradients of aten::prod have another formula.*\(the bundle is from before"
    ):
        small_made(tmp_path / "job.port", captured, 64 << 20)
