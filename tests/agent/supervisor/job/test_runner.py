"""The runner with a real worker process: started, paused, left, cancelled, killed; and when it cannot start."""

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.federate.orders import FOLDER, MODEL_FILE, RESULT_FILE, RESULT_PART_FILE, START_FILE
from port_agent.jobs.job import JobKind, JobRequestError, JobState
from port_agent.policy.decide import ResourceLimits
from port_agent.supervisor.job.worker_kinds import BundleFacts
from port_agent.supervisor.job.worker_process import WorkerPhase, WorkerProcess
from tests.agent.live_daemon import BUNDLE, LONG, go
from tests.agent.supervisor.job.running_job import ROOMY, RunningJob, running_job


async def training(live: RunningJob) -> None:
    assert live.start()
    await live.until(lambda: live.runner.phase is WorkerPhase.TRAINING)


@pytest.mark.process
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


@pytest.mark.process
@go
async def test_one_worker_at_a_time(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        await training(live)
        with pytest.raises(JobRequestError, match="still running here"):
            live.start()


@pytest.mark.process
@go
async def test_a_pause_holds_and_leaving_puts_the_job_back_in_line(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        await training(live)
        live.runner.pause()
        await live.until(lambda: live.runner.phase is WorkerPhase.PAUSED)
        live.runner.resume()
        await live.until(lambda: live.runner.phase is WorkerPhase.TRAINING)
        live.runner.leave("somebody plays")
        live.runner.leave("the agent stops")
        job = await live.over()
        assert (job.state, job.failures, job.reason) == (JobState.QUEUED, 0, "left: somebody plays")
        live.store.flush()
        assert any("left: somebody plays" in entry.text for entry in live.store.history(live.id))


@pytest.mark.process
@go
async def test_leaving_after_a_checkpoint_loses_no_step(tmp_path: Path) -> None:
    async with running_job(tmp_path, {**LONG, "checkpoint_every": 1_000_000}) as live:
        await training(live)
        live.runner.leave_after_checkpoint("the window closes")
        job = await live.over()
        assert job.state is JobState.QUEUED and job.measured.checkpoint_bytes


@pytest.mark.process
@go
async def test_a_cancelled_job_is_over(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        await training(live)
        live.store.save(replace(live.job, state=JobState.CANCELLED))
        live.runner.cancel()
        assert (await live.over()).state is JobState.CANCELLED


@pytest.mark.process
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
        (live.store.job_dir(live.id) / "bundle").write_text("{")
        assert not live.start()
        assert live.job.state is JobState.FAILED and "bundle cannot be used" in live.job.reason


@pytest.mark.process
def test_a_bundle_that_cannot_be_read_for_now_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_try_again(tmp_path, monkeypatch))


async def _try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_job(tmp_path, BUNDLE) as live:

        def refuse(bundle: Path) -> BundleFacts:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(bundle))

        kinds = live.runner._kinds
        refusing = {kind: replace(known, read_bundle=refuse) for kind, known in kinds.items()}
        monkeypatch.setattr(live.runner, "_kinds", refusing)
        assert not live.start()
        assert (live.job.state, live.job.failures) == (JobState.BACKOFF, 1)
        assert "Too many open files" in live.job.reason and "tried again" in live.job.reason
        monkeypatch.setattr(live.runner, "_kinds", kinds)
        assert live.start() and (await live.over()).state is JobState.FINISHED


@pytest.mark.process
@go
async def test_where_no_plan_fits_nothing_starts_and_it_is_said(tmp_path: Path) -> None:
    async with running_job(tmp_path, BUNDLE) as live:
        assert not live.start(replace(ROOMY, limits=ResourceLimits(memory_bytes=50 << 20)))
        assert live.job.state is JobState.QUEUED and live.health.holds("job-does-not-fit", str(live.id))
        assert live.start()
        assert not live.health.holds("job-does-not-fit", str(live.id))


@pytest.mark.process
@go
async def test_a_job_whose_device_is_gone_waits_for_it(tmp_path: Path) -> None:
    async with running_job(tmp_path, {**LONG, "device": "cuda"}) as live:
        gone, there = (replace(ROOMY, devices=frozenset(kinds)) for kinds in ([], ["cuda"]))
        assert not live.runner.fits(live.job, gone) and not live.start(gone)
        assert live.job.state is JobState.QUEUED and live.health.holds("device-absent", str(live.id))
        assert live.runner.fits(live.job, there) and not live.health.holds("device-absent", str(live.id))
        assert live.start(there)
        run = live.runner._run
        assert run is not None and isinstance(run.worker, WorkerProcess)
        assert run.worker._launch.data_limit_bytes is None, "a driver maps more than it uses"


@go
async def test_of_a_device_that_no_sensor_looks_for_the_worker_says_whether_it_is_there(tmp_path: Path) -> None:
    async with running_job(tmp_path, {**LONG, "device": "xla"}) as live:
        assert live.runner.fits(live.job, replace(ROOMY, devices=frozenset()))


@pytest.mark.process
@go
async def test_the_worker_of_an_earlier_supervisor_is_not_joined_by_another(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as first:
        await training(first)
        async with running_job(tmp_path / "second", LONG) as second:
            second.runner._worker_lock = first.runner._worker_lock
            assert not second.start()
            assert "an earlier supervisor" in second.job.reason


@pytest.mark.process
@go
async def test_what_a_fine_tuning_makes_in_a_federation_gets_its_name_and_the_average_becomes_the_result(
    tmp_path: Path,
) -> None:
    async with running_job(tmp_path, BUNDLE, kind=JobKind.FINETUNE, federated=True) as live:
        folder = live.store.job_dir(live.id) / FOLDER
        folder.mkdir()
        (folder / START_FILE).touch()
        assert live.start()
        job = await live.over()
        assert (job.state, job.rounds, job.result) == (JobState.WAITING_DATA, 1, None)
        assert (folder / RESULT_FILE).exists() and not (folder / RESULT_PART_FILE).exists()
        assert not live.start(), "the round is trained"
        (folder / MODEL_FILE).touch()
        assert live.start()
        job = await live.over()
        assert (job.state, job.rounds, job.failures) == (JobState.WAITING_DATA, 1, 0)
        assert job.result is not None and f"the average is in {job.result}" in job.reason
        assert not (folder / MODEL_FILE).exists() and not live.start()
