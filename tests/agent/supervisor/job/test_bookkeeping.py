"""What becomes of a job when its real worker has ended, in its record and on the health board."""

from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.jobs.job import JobState
from port_agent.supervisor.job.log import read_log
from port_agent.supervisor.job.worker_process import WorkerPhase
from tests.agent.live_daemon import BUNDLE, LONG, go
from tests.agent.supervisor.job.running_job import ROOMY, running_job

pytestmark = pytest.mark.process


@go
async def test_out_of_memory_brings_the_smaller_plan_into_the_next_run(tmp_path: Path) -> None:
    async with running_job(tmp_path, {**BUNDLE, "faults": {"memory_error_above": 150 << 20}}) as live:
        assert live.start() and live.job.plan == 0
        job = await live.over()
        assert not job.state.is_over and job.memory_ceiling_bytes == 200 << 20
        assert live.health.holds("out-of-memory", str(live.id))
        assert live.start() and live.job.plan == 1
        assert (await live.over()).state is JobState.FINISHED


@go
async def test_a_job_that_fails_again_and_again_is_said_then_given_up(tmp_path: Path) -> None:
    conditions = replace(ROOMY, give_up_after=3)
    async with running_job(tmp_path, {**BUNDLE, "faults": {"fail_at": 0}}) as live:
        for failures, code in ((1, ""), (2, "job-failing"), (3, "job-given-up")):
            assert live.start(conditions)
            job = await live.over()
            assert job.failures == failures
            told = {name for name in ("job-failing", "job-given-up") if live.health.holds(name, str(live.id))}
            assert told == ({code} if code else set())
        assert job.state is JobState.FAILED and job.finished_at is not None
        assert "told to fail" in job.reason


@go
async def test_what_the_user_said_meanwhile_holds(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        assert live.start()
        await live.until(lambda: live.runner.phase is WorkerPhase.TRAINING)
        live.store.save(replace(live.job, state=JobState.PAUSED, reason="by you"))
        live.runner.leave("paused by you")
        job = await live.over()
        assert (job.state, job.reason) == (JobState.PAUSED, "by you")


@go
async def test_history_and_log_tell_the_same(tmp_path: Path) -> None:
    async with running_job(tmp_path, BUNDLE) as live:
        assert live.start()
        await live.over()
        assert live.history() == ["started", "finished"]
        log = read_log(live.store.job_dir(live.id), 100)[0]
        assert log.index("started at step 0") < log.index("at step 30: finished")
