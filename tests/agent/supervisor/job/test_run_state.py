"""What a run depends on and what `status` shows of it."""

import asyncio
from pathlib import Path

import pytest

from port_agent.jobs.job import Job, JobMeasurements, JobSpec
from port_agent.policy.decide import ResourceLimits
from port_agent.supervisor.job.log import JobLog
from port_agent.supervisor.job.plan_choice import MIB, PlanFigures, memory_max
from port_agent.supervisor.job.run_state import RunConditions, WorkerRun
from port_agent.supervisor.job.silence_monitor import SilenceMonitor
from port_agent.supervisor.job.worker_process import Launch, WorkerProcess
from port_agent.system.cgroup import WorkerLimits

PLANS = (PlanFigures(0, 200 * MIB), PlanFigures(3, 100 * MIB))
HALF = ResourceLimits(cpu_percent=40.0, memory_percent=50.0)


@pytest.mark.parametrize(
    ("limits", "total", "memory"),
    [
        (HALF, 1000 * MIB, 500 * MIB),
        (HALF, None, None),
        (ResourceLimits(memory_percent=50.0, memory_bytes=300 * MIB), 1000 * MIB, 300 * MIB),
        (ResourceLimits(memory_percent=50.0, memory_bytes=300 * MIB), None, 300 * MIB),
    ],
)
def test_a_plan_gets_its_own_limit_and_a_worker_without_one_all_that_is_allowed(
    limits: ResourceLimits, total: int | None, memory: int | None
) -> None:
    conditions = RunConditions(limits, total)
    assert conditions.memory_bytes == memory
    assert conditions.worker_limits(None) == WorkerLimits(memory, limits.cpu_percent)
    assert conditions.worker_limits(PLANS[1]) == WorkerLimits(memory_max(100 * MIB), limits.cpu_percent)


def run(root: Path, plan: int | None) -> WorkerRun:
    """Return the state of a run whose process was not started."""

    async def make() -> WorkerProcess:
        return WorkerProcess(Launch(()), on_event=print, on_output=print, on_exit=print, on_disobedience=print)

    return WorkerRun(
        4,
        asyncio.run(make()),
        JobLog(root, MIB),
        PLANS,
        plan,
        None,
        WorkerLimits(memory_max(100 * MIB), 100.0),
        None,
        last_checkpoint_s=0.0,
        last_flush_s=0.0,
        switched_at_s=0.0,
        silence=SilenceMonitor(0.0),
    )


@pytest.mark.parametrize(("plan", "peak"), [(3, 100 * MIB), (1, 0), (None, 0)])
def test_a_plan_is_known_by_its_index_in_the_bundle(tmp_path: Path, plan: int | None, peak: int) -> None:
    assert run(tmp_path, plan).peak_bytes == peak


def test_status_shows_what_is_planned_beside_what_was_measured(tmp_path: Path) -> None:
    measured = JobMeasurements(step_s=0.5, peak_rss_bytes=90 * MIB)
    spec = JobSpec("birds", "b", deadline_at=9.0)
    job = Job(4, spec, 0.0, step=20, total_steps=100, loss=0.25, planned_joules=3.0, measured=measured)
    shown = run(tmp_path, 3).status(job)
    assert (shown.id, shown.name, shown.kind, shown.phase, shown.requested) == (
        4,
        "birds",
        "train",
        "starting",
        "train",
    )
    assert (shown.step, shown.total_steps, shown.loss, shown.step_s, shown.eta_s) == (20, 100, 0.25, 0.5, 40.0)
    assert (shown.plan, shown.plans, shown.planned_peak_bytes, shown.peak_rss_bytes) == (3, 2, 100 * MIB, 90 * MIB)
    assert (shown.planned_joules, shown.deadline_at, shown.waits_for) == (3.0, 9.0, None)
    assert shown.memory_limit_bytes is None, "without a group nothing holds it to its limit"
    assert run(tmp_path, None).status(job).planned_peak_bytes is None
