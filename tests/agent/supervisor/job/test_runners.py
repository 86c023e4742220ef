"""Several runners: which are there, what they tell the meter."""

import asyncio
from pathlib import Path

from agent.supervisor.job.board_places import THIS_COMPUTER
from agent.supervisor.job.runners import MeteredRuns, worker_lock
from agent.worker.protocol import Event, WorkerPaused, WorkerReady, WorkerResumed
from tests.agent.live_daemon import LONG, go
from tests.agent.supervisor.parts import parts


class Heard:
    """A meter that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_worker_start(self, job: str, now_s: float, label: str = "") -> None:
        self.told.append(f"start {job} {label}")

    def on_worker_stop(self, job: str, now_s: float) -> None:
        self.told.append(f"stop {job}")

    def on_event(self, event: Event, now_s: float) -> None:
        self.told.append(type(event).__name__)

    def take(self) -> list[str]:
        told, self.told = self.told, []
        return told


def test_the_meter_hears_of_one_job_at_a_time() -> None:
    runs, meter = MeteredRuns(), Heard()
    host, left, right = runs.of(THIS_COMPUTER), runs.of("left"), runs.of("right")
    runs.meter = meter
    left.on_worker_start("2", 1.0, "two")
    right.on_worker_start("3", 1.0, "three")
    right.on_event(WorkerReady(pid=1, step=0, total_steps=1), 1.5)
    assert meter.take() == ["start 2 two"]
    host.on_worker_start("1", 2.0, "one")
    left.on_event(WorkerPaused(step=1), 2.0)
    host.on_event(WorkerResumed(step=1), 2.0)
    assert meter.take() == ["stop 2", "start 1 one", "WorkerResumed"]
    host.on_worker_stop("1", 3.0)
    assert meter.take() == ["stop 1", "start 2 two", "WorkerPaused"]
    left.on_event(WorkerResumed(step=1), 3.0)
    right.on_worker_stop("3", 3.0)
    left.on_worker_stop("2", 4.0)
    assert meter.take() == ["WorkerResumed", "stop 2"]


@go
async def test_boards_have_a_runner_while_they_have_a_job(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        runners = made.core.runners
        first, second = runners.at("/dev/a"), runners.at("/dev/b")
        assert list(runners) == [runners.host, first, second] and runners.at("/dev/a") is first
        job = made.add("birds", LONG)
        assert second.start(job, first._surroundings)
        runners.tidy()
        assert list(runners) == [runners.host, second] and runners.of_job(job.id) is second
        assert runners.shown is second and [run.id for run in runners.statuses()] == [job.id]
        assert worker_lock(tmp_path / "state", 2).exists() and not worker_lock(tmp_path / "state", 0).exists()
        assert runners.at("/dev/c") not in (runners.host, first, second)
        runners.kill()
        await made.until(lambda: not runners.busy())
        await asyncio.sleep(0)
        assert runners.take_written_bytes() >= 0 and runners.shown is runners.host
