"""The runner with a real worker process: started, paused, left, cancelled, killed; and when it cannot start."""

from dataclasses import replace
from pathlib import Path

import pytest

from agent.jobs.model import JobRequestError, JobState
from agent.policy.decide import ResourceLimits
from agent.supervisor.job.worker_process import WorkerPhase
from tests.agent.live_daemon import BUNDLE, LONG, go
from tests.agent.supervisor.job.running_job import ROOMY, RunningJob, running_job


async def training(live: RunningJob) -> None:
    assert live.start()
    await live.until(lambda: live.runner.phase is WorkerPhase.TRAINING)


@go
async def test_a_run_from_start_to_result(tmp_path: Path) -> None:
    async with running_job(tmp_path, BUNDLE) as live:
        await training(live)
        assert live.job.state is JobState.RUNNING and live.runner.pid is not None
        shown = live.runner.status()
        assert shown is not None
        assert (shown.name, shown.phase, shown.plans) == ("birds", "training", 2)
        job = await live.over()
        assert (job.state, job.step, job.attempts) == (JobState.FINISHED, 30, 1)
        assert job.result == str(live.store.job_dir(live.id) / "out.safetensors")
        assert (live.runner.job, live.runner.phase, live.runner.pid, live.runner.status()) == (None,) * 4


@go
async def test_one_worker_at_a_time(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        await training(live)
        with pytest.raises(JobRequestError, match="one worker at a time"):
            live.start()


@go
async def test_a_pause_holds_and_leaving_puts_the_job_back_in_line(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        await training(live)
        live.runner.pause()
        await live.until(lambda: live.runner.phase is WorkerPhase.PAUSED)
        live.runner.resume()
        await live.until(lambda: live.runner.phase is WorkerPhase.TRAINING)
        live.runner.leave("somebody plays")
        job = await live.over()
        assert (job.state, job.failures) == (JobState.QUEUED, 0)


@go
async def test_leaving_after_a_checkpoint_loses_no_step(tmp_path: Path) -> None:
    async with running_job(tmp_path, {**LONG, "checkpoint_every": 1_000_000}) as live:
        await training(live)
        live.runner.leave_after_checkpoint("the window closes")
        job = await live.over()
        assert job.state is JobState.QUEUED and job.measured.checkpoint_bytes


@go
async def test_a_cancelled_job_is_over(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        await training(live)
        live.store.save(replace(live.job, state=JobState.CANCELLED))
        live.runner.cancel()
        assert (await live.over()).state is JobState.CANCELLED


@go
async def test_a_killed_worker_counts_as_a_failure(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        await training(live)
        live.runner.kill()
        job = await live.over()
        assert (job.state, job.failures) == (JobState.BACKOFF, 1)


@go
async def test_a_broken_bundle_ends_the_job_before_it_starts(tmp_path: Path) -> None:
    async with running_job(tmp_path, BUNDLE) as live:
        (live.store.job_dir(live.id) / "bundle.json").write_text("{")
        assert not live.start()
        assert live.job.state is JobState.FAILED and "bundle cannot be used" in live.job.reason


@go
async def test_where_no_plan_fits_nothing_starts_and_it_is_said(tmp_path: Path) -> None:
    async with running_job(tmp_path, BUNDLE) as live:
        assert not live.start(replace(ROOMY, limits=ResourceLimits(memory_bytes=50 << 20)))
        assert live.job.state is JobState.QUEUED and live.health.holds("job-does-not-fit", str(live.id))
        assert live.start()
        assert not live.health.holds("job-does-not-fit", str(live.id))


@go
async def test_the_worker_of_an_earlier_supervisor_is_not_joined_by_another(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as first:
        await training(first)
        async with running_job(tmp_path / "second", LONG) as second:
            second.runner._worker_lock = first.runner._worker_lock
            assert not second.start()
            assert "an earlier supervisor" in second.job.reason
