"""Plans of a real worker while it trains: smaller under pressure, larger with memory, corrected by what steps take."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.energy.drift import Correction
from port_agent.policy.decide import ResourceLimits
from port_agent.supervisor.job.plan_switching import PLAN_SWITCH_PAUSE_S, PRESSURE_MEMORY_S
from port_agent.supervisor.job.run_state import WorkerRun
from port_agent.supervisor.job.worker_process import WorkerPhase
from tests.agent.live_daemon import LONG, go
from tests.agent.supervisor.job.running_job import ROOMY, RunningJob, running_job

pytestmark = pytest.mark.process

SMALL = replace(ROOMY, limits=ResourceLimits(memory_bytes=150 << 20))
NONE = replace(ROOMY, limits=ResourceLimits(memory_bytes=50 << 20))


async def training(live: RunningJob) -> WorkerRun:
    assert live.start()
    await live.until(lambda: live.runner.phase is WorkerPhase.TRAINING)
    run = live.runner._run
    assert run is not None
    return run


@go
async def test_pressure_brings_the_smaller_plan_which_then_stays(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        run = await training(live)
        assert (run.plan, live.job.plan) == (0, 0)
        live.runner.adapt(ROOMY, pressure=True)
        await live.until(lambda: live.job.plan == 1)
        assert run.granted is not None and run.granted.index == 1
        assert live.history()[-1] == "plan"
        run.switched_at_s -= PLAN_SWITCH_PAUSE_S
        live.runner.adapt(ROOMY, pressure=False)  # there is room again, but the system was short a moment ago
        assert run.granted.index == 1
        run.switched_at_s -= PLAN_SWITCH_PAUSE_S
        run.pressed_until_s -= PRESSURE_MEMORY_S
        live.runner.adapt(ROOMY, pressure=False)
        assert run.granted.index == 0  # the larger plan's memory is granted before the worker changes to it
        await live.until(lambda: live.job.plan == 0)


@go
async def test_figures_settle_before_plans_change_again(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        run = await training(live)
        run.switched_at_s = time.monotonic()
        live.runner.adapt(SMALL, pressure=False)
        assert run.granted is not None and run.granted.index == 0


@go
async def test_a_worker_leaves_where_no_plan_fits_any_more(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        await training(live)
        live.runner.adapt(NONE, pressure=False)
        job = await live.over()
        assert not job.state.is_over and job.failures == 0


@go
async def test_corrected_figures_choose_anew(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG) as live:
        run = await training(live)
        live.runner.correct(Correction(str(live.id), 0, 100, 3.0, 5.0, "steps take 3 times as long"))
        assert [plan.step_s for plan in run.plans] == pytest.approx([0.03, 0.06])
        assert [plan.step_joules for plan in run.plans] == pytest.approx([0.5, 1.0])
        assert live.history().count("plan") == 1
        live.runner.correct(Correction(str(live.id), 0, 100, 0.5, None, "faster again"))
        assert run.plans[0].step_s == pytest.approx(0.015) and live.history().count("plan") == 1
        live.runner.correct(Correction("77", 0, 100, 9.0, 9.0, "another job"))
        assert run.plans[0].step_s == pytest.approx(0.015)


@go
async def test_a_deadline_that_cannot_be_kept_is_said_and_taken_back(tmp_path: Path) -> None:
    async with running_job(tmp_path, LONG, deadline_at=time.time() + 1.0) as live:
        await training(live)
        live.store.keep_in_memory(replace(live.job, measured=replace(live.job.measured, step_s=10.0)))
        live.runner.adapt(ROOMY, pressure=False)
        assert live.health.holds("deadline-missed", str(live.id))
        live.store.keep_in_memory(replace(live.job, spec=replace(live.job.spec, deadline_at=time.time() + 1e9)))
        live.runner.adapt(ROOMY, pressure=False)
        assert not live.health.holds("deadline-missed", str(live.id))
