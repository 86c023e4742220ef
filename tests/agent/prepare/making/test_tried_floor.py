"""What a refusal names is what the next run takes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from port_agent.prepare.making import refinement
from port_agent.prepare.making.tried_floor import confirm_floor
from port_agent.prepare.measurement.dry_run import DryRun, DryRunError
from port_planner.base.units import parse_bytes
from port_planner.ir.bundle.bundle import Bundle
from port_planner.make_bundle import CapturedJob, InfeasibleError
from tests.agent.prepare.making.small_bundles import MIB, deep, fake_trials, shallow, small_made


def beside_the_plan(unplanned_bytes: Callable[[int], int], start_bytes: int) -> Callable[..., DryRun]:
    """Return trials in which a worker holds so much more than is planned, of a budget."""

    def dry_run(path: Path, *_: object, **__: object) -> DryRun:
        planned = Bundle(path).manifest.plans[0]
        base_bytes = next(iter(Bundle(path).costs.values())).device.base_bytes
        return DryRun(planned.peak_bytes - base_bytes + unplanned_bytes(planned.ram_bytes), start_bytes)

    return dry_run


@pytest.mark.slow
@pytest.mark.parametrize("make_captured", [shallow, deep])
@pytest.mark.parametrize(
    ("unplanned_bytes", "start_bytes"),
    [
        (lambda _: 9 * MIB, 0),
        (lambda _: 9 * MIB, 30 * MIB),
        (lambda ram_bytes: 9 * MIB + ram_bytes // 8, 4 * MIB),
    ],
)
def test_a_budget_that_a_refusal_names_is_taken(
    make_captured: Callable[[], CapturedJob],
    unplanned_bytes: Callable[[int], int],
    start_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = make_captured()
    monkeypatch.setattr(refinement, "loading_peak", lambda: start_bytes)
    fake_trials(monkeypatch, beside_the_plan(unplanned_bytes, start_bytes))
    with pytest.raises(InfeasibleError, match="within which a trial of it kept") as refused:
        small_made(tmp_path / "job.port", captured, 5 * MIB)
    (named,) = re.findall(r"raise --ram to (\w+)", str(refused.value))
    assert [*tmp_path.iterdir()] == []
    made = small_made(tmp_path / "job.port", captured, parse_bytes(named))
    assert made.measured_peak_bytes <= parse_bytes(named) <= 1.2 * max(made.measured_peak_bytes, start_bytes)


@pytest.mark.slow
def test_what_a_worker_holds_beside_one_plan_rejects_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plans seem to need more than the budget, and the one that is tried for the refusal's figure fits."""
    captured, bare = deep(), beside_the_plan(lambda _: 9 * MIB, 0)
    monkeypatch.setattr(refinement, "loading_peak", lambda: 0)
    fake_trials(monkeypatch, bare)
    with pytest.raises(InfeasibleError) as refused:
        small_made(tmp_path / "job.port", captured, 5 * MIB)
    (named,) = re.findall(r"raise --ram to (\w+)", str(refused.value))
    heavy = beside_the_plan(lambda _: 12 * MIB, 0)
    ran = list[DryRun]()

    def dry_run(path: Path, *_: object, **__: object) -> DryRun:
        ran.append((bare if ran else heavy)(path))
        return ran[-1]

    fake_trials(monkeypatch, dry_run)
    made = small_made(tmp_path / "job.port", captured, parse_bytes(named))
    assert len(ran) > 2 and made.measured_peak_bytes <= parse_bytes(named) < ran[0].peak_bytes


@pytest.mark.slow
def test_where_no_trial_can_be_run_the_figure_is_said_to_be_the_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> DryRun:
        raise DryRunError("the dry run ended")

    monkeypatch.setattr(refinement, "loading_peak", lambda: 0)
    fake_trials(monkeypatch, fails)
    with pytest.raises(InfeasibleError, match="raise --ram to at least"):
        small_made(tmp_path / "job.port", deep(), MIB)


@pytest.mark.parametrize(
    ("least", "named", "is_tried"), [(90, 100, True), (150, 160, True), (10_000, 106, False), (None, 100, False)]
)
def test_a_budget_is_named_once_the_computation_of_the_next_run_accepts_it(
    least: int | None, named: int, is_tried: bool
) -> None:
    """The first refusal tells what the next run needs; 10,000 stands for one that tells nothing and accepts nothing."""
    refusal = InfeasibleError("no plan fits", 100 * MIB)
    refusal.held_bytes, asked = 40 * MIB, list[tuple[int, int]]()

    def accept(ram_bytes: int, held_bytes: int) -> None:
        asked.append((ram_bytes, held_bytes))
        if least is None:
            raise DryRunError("the dry run ended")
        if ram_bytes < least * MIB:
            error = InfeasibleError("no plan fits", 160 * MIB if least == 150 else None)
            error.held_bytes = 60 * MIB
            raise error

    confirm_floor(refusal, accept)
    assert (refusal.needed_bytes, refusal.is_tried) == (pytest.approx(named * MIB, rel=0.005), is_tried)
    assert asked[0] == (99 * MIB, 40 * MIB) and all(held_bytes == 60 * MIB for _, held_bytes in asked[1:])


def test_a_budget_of_which_nothing_was_tried_stays_as_it_is_named() -> None:
    refusal = InfeasibleError("no plan fits", 100 * MIB)
    confirm_floor(refusal, lambda *_: pytest.fail("nothing is known of a worker"))
    assert (refusal.needed_bytes, refusal.is_tried) == (100 * MIB, False)
