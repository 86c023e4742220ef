"""What a real worker reports, as it stands in its job's record, history and log."""

import time
from pathlib import Path

import pytest

from port_agent.supervisor.job.log import read_log
from port_agent.worker.protocol import StateRecovered, StepDone
from tests.agent.live_daemon import BUNDLE, LONG, go
from tests.agent.supervisor.job.running_job import running_job

pytestmark = pytest.mark.process


@go
async def test_steps_and_checkpoints_are_taken_over(tmp_path: Path) -> None:
    async with running_job(tmp_path, BUNDLE, checkpoint_every=10) as live:
        assert live.start()
        job = await live.over()
        assert (job.step, job.total_steps) == (30, 30)
        assert job.loss is not None and job.trained_s > 0
        assert job.planned_joules == pytest.approx(30 * 0.1)
        assert job.measured.step_s is not None and job.measured.step_s >= 4 * 0.002
        assert job.measured.checkpoint_bytes and job.measured.checkpoint_s is not None
        assert live.runner.take_written_bytes() >= 3 * job.measured.checkpoint_bytes
        assert live.runner.take_written_bytes() == 0


@go
async def test_time_in_a_pause_is_no_part_of_a_step(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        assert live.start()
        await live.until(lambda: live.job.total_steps is not None)
        live.runner.pause()
        run = live.runner._run
        assert run is not None and run.last_step_s is None


@go
async def test_a_failure_is_logged_with_the_workers_own_words(tmp_path: Path) -> None:
    async with running_job(tmp_path, {**BUNDLE, "faults": {"fail_at": 3}}) as live:
        assert live.start()
        job = await live.over()
        assert job.step == 3
        assert "told to fail" in read_log(live.store.job_dir(live.id), 100)[0]


@go
async def test_tensors_that_outgrow_what_the_plan_keeps_for_them_are_a_condition_with_a_remedy(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        assert live.start()
        await live.until(lambda: live.job.total_steps is not None)
        step = StepDone(step=3, epoch=0, loss=1.0, wall_s=1.0, cpu_s=1.0, phases_s={}, packing_overflows=2)
        live.runner._on_event(step)
        (item,) = [item for item in live.health.items(time.monotonic()) if item.code == "packing-overflow"]
        assert (
            "in step 3 2 tensors needed more memory when packed" in item.text
            and "a plan that reserves more" in item.remedy
        )


@go
async def test_a_step_that_passes_its_plan_on_the_device_is_a_condition(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        assert live.start()
        await live.until(lambda: live.job.total_steps is not None)
        step = StepDone(step=3, epoch=0, loss=1.0, wall_s=1.0, cpu_s=1.0, phases_s={}, device_excess_bytes=5 << 20)
        live.runner._on_event(step)
        (item,) = [item for item in live.health.items(time.monotonic()) if item.code == "device-over-plan"]
        assert "by step 3 its tensors had taken 5.0 MiB more" in item.text and "plan the job again" in item.remedy


@go
async def test_damaged_state_sets_the_job_back_and_says_so(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        assert live.start()
        await live.until(lambda: live.job.total_steps is not None)
        live.runner._on_event(StateRecovered(step=2, reason="state.pages: a block has rotted", lost_steps=5))
        assert "recovered" in live.history()
        (item,) = [item for item in live.health.items(time.monotonic()) if item.code == "state-damaged"]
        assert "5 steps are trained again" in item.text and "a block has rotted" in item.text
