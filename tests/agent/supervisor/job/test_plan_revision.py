"""Plans made again beside a real worker: only for other proportions, only while training is allowed,
and taken up where worth it.
"""

from pathlib import Path

import msgspec
import psutil
import pytest

from port_agent.supervisor.job import plan_revision
from port_agent.supervisor.job.plan_revision import PlanRevision, RevisedPlans, StepPace
from port_agent.supervisor.job.worker_kinds import DEFAULT_KINDS
from port_agent.supervisor.job.worker_process import WorkerPhase
from port_agent.worker.protocol import StepDone
from port_planner.ir.bundle.revision import read_revision, revision_path
from port_planner.ir.costs import Speeds
from tests.agent.jobs_small import make_job, small_bundle, write_job
from tests.agent.live_daemon import go
from tests.agent.supervisor.job.running_job import ROOMY, RunningJob, running_job
from tests.waiting import until

ROOM = 1 << 30


def step(wall_s: float = 2.0, stall_s: float = 0.5, cpu_s: float = 1.2, moved: int = 10**6) -> StepDone:
    phases = {"stall": stall_s, "page_in": 0.5, "page_out": 0.25}
    return StepDone(
        step=1,
        epoch=0,
        loss=1.0,
        wall_s=wall_s,
        cpu_s=cpu_s,
        phases_s=phases,
        paged_in_bytes=moved,
        paged_out_bytes=moved,
        planned_compute_s=0.5,
    )


@pytest.mark.parametrize(("one_thread", "compute"), [(True, 2.4), (False, 3.0)])
def test_the_pace_of_steps(one_thread: bool, compute: float) -> None:
    pace = StepPace(Speeds(), one_thread=one_thread)
    for _ in range(plan_revision.WATCHED_STEPS):
        assert pace.speeds() is None
        pace.add(step())
    assert is_about(pace.speeds(), Speeds(compute, 2e6, 4e6))


def test_speeds_count_from_the_bundles_own_costs_and_what_never_moved_is_unknown() -> None:
    pace = StepPace(Speeds(2.0, 7e6), one_thread=False)
    for _ in range(plan_revision.WATCHED_STEPS):
        pace.add(step(moved=0))
    assert is_about(pace.speeds(), Speeds(6.0))


def test_a_short_or_unplanned_run_says_nothing() -> None:
    pace = StepPace(Speeds(), one_thread=False)
    for _ in range(2 * plan_revision.WATCHED_STEPS):
        pace.add(step(wall_s=0.01, stall_s=0.0))
    assert pace.speeds() is None
    pace.add(StepDone(step=1, epoch=0, loss=1.0, wall_s=1e6, cpu_s=1.0, phases_s={}))
    assert pace.speeds() is None


def watched(bundle: Path, known: Speeds | None = None) -> PlanRevision:
    revision = PlanRevision(bundle, known, one_thread=False)
    for _ in range(plan_revision.WATCHED_STEPS):
        revision.take(step())
    return revision


def is_about(found: Speeds | None, expected: Speeds) -> bool:
    return found is not None and bool(
        msgspec.structs.astuple(found) == pytest.approx(msgspec.structs.astuple(expected))
    )


def ended(revision: PlanRevision) -> RevisedPlans:
    return until(lambda: revision.look(1, ROOM), lambda: "the process did not end")


@pytest.mark.process
def test_plans_are_made_again_once_for_what_was_seen(tmp_path: Path) -> None:
    bundle = tmp_path / "job.port"
    bundle.write_bytes(small_bundle().read_bytes())
    revision = watched(bundle)
    assert ended(revision).saved > plan_revision.WORTH_A_RESTART
    assert is_about(read_revision(revision_path(bundle)).speeds, Speeds(3.0, 2e6, 4e6))
    for _ in range(plan_revision.WATCHED_STEPS):
        revision.take(step(wall_s=9.0))
    assert revision.look(1, ROOM) is None and revision._process is None


@pytest.mark.parametrize(
    ("known", "free"),
    [(Speeds(1.1, 2e6, 4e6), ROOM), (None, plan_revision.MIN_SOLVER_BYTES - 1)],
    ids=["known", "no room"],
)
def test_nothing_is_begun_for_little_new_or_without_room(tmp_path: Path, known: Speeds | None, free: int) -> None:
    revision = PlanRevision(tmp_path / "job.port", known, one_thread=False)
    for _ in range(plan_revision.WATCHED_STEPS):
        revision.take(step(wall_s=1.0))
    assert revision.look(0, free) is None and revision._process is None


@pytest.mark.process
def test_a_process_is_given_up_when_training_may_not_go_on(tmp_path: Path) -> None:
    bundle = tmp_path / "job.port"
    bundle.write_bytes(small_bundle().read_bytes())
    revision = watched(bundle)
    revision.look(1, ROOM)
    process = revision._process
    assert process is not None
    revision.stop()
    assert process.poll() is not None and revision.look(1, ROOM) is None
    assert not revision_path(bundle).exists()


@pytest.mark.process
def test_a_process_that_fails_leaves_the_plans_as_they_were(tmp_path: Path) -> None:
    bundle = tmp_path / "job.port"
    bundle.write_bytes(b"not a valid bundle")
    revision = watched(bundle)
    revision.look(1, ROOM)
    assert revision._process is not None
    revision._process.wait()
    assert revision.look(1, ROOM) is None and revision._process is None


def test_what_the_history_says() -> None:
    assert "none saves 2%" in RevisedPlans(1.0, 0.99, 0, 0).text
    assert RevisedPlans(0.0, 0.0, 0, 0).saved == 0.0
    text = RevisedPlans(10.0, 8.0, 3 << 20, 1 << 20).text
    assert text.endswith("8 J per step with wear instead of 10, 1.0 MiB written instead of 3.0 MiB")


def planned(live: RunningJob) -> float:
    """Return the joules of the plan that a job runs."""
    assert live.runner._run is not None and live.runner._run.figures is not None
    return live.runner._run.figures.step_joules or 0.0


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few steps of a small job be enough to look at."""
    monkeypatch.setattr(plan_revision, "WATCHED_STEPS", 5)
    monkeypatch.setattr(plan_revision, "WATCHED_S", 0.0)


@pytest.mark.process
@pytest.mark.usefixtures("hasty")
@go
async def test_a_job_goes_on_with_better_plans(tmp_path: Path) -> None:
    bundle = tmp_path / "job.port"
    write_job(bundle, make_job(scheduler=None), ram_bytes=1 << 30, seeds=(1,), compared=0)
    (tmp_path / "store").mkdir()
    async with running_job(tmp_path / "store", bundle, kinds=DEFAULT_KINDS, steps=10**6) as live:
        assert live.start()
        await live.until(lambda: live.runner.phase is WorkerPhase.TRAINING)
        first = planned(live)

        def has_left() -> bool:
            live.runner.adapt(ROOMY, pressure=False)
            return live.runner.job is None

        await live.until(has_left)
        left_at = live.job.step
        assert left_at > 0 and live.job.failures == 0
        live.store.flush()
        assert any("planned again" in entry.text for entry in live.store.history(live.id))
        assert live.start()
        await live.until(lambda: live.runner.phase is WorkerPhase.TRAINING)
        assert (
            live.job.step >= left_at and planned(live) != first
        )  # how much less it takes is measured, and in the history
        assert "--revision" in psutil.Process(live.runner.pid).cmdline()
