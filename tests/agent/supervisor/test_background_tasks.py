"""Which finished jobs are deleted first, and which not yet."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.jobs.job import Job, JobSpec, JobState
from port_agent.policy.config import AgentOptions, Config
from port_agent.supervisor import background_tasks
from port_agent.supervisor.background_tasks import BackgroundTasks, too_old
from port_agent.supervisor.dispatch import Dispatcher
from port_agent.supervisor.job.worker_process import WorkerPhase
from tests.agent.live_daemon import LONG, go
from tests.agent.supervisor.parts import TRAIN, parts


def test_the_oldest_jobs_go_first_beyond_count_or_size() -> None:
    jobs = [Job(number, JobSpec("x", "b"), 0.0) for number in range(1, 6)]
    sizes = {1: 10, 2: 50, 3: 10, 4: 10, 5: 10}
    assert too_old(jobs, sizes, keep_jobs=10, keep_bytes=100) == []
    assert too_old(jobs, sizes, keep_jobs=3, keep_bytes=100) == [1, 2]
    assert too_old(jobs, sizes, keep_jobs=10, keep_bytes=80) == [1]
    assert too_old(jobs, sizes, keep_jobs=10, keep_bytes=40) == [1, 2]
    assert too_old(jobs, sizes, keep_jobs=10, keep_bytes=5) == [1, 2, 3, 4, 5]
    assert too_old([], {}, keep_jobs=0, keep_bytes=0) == []


@pytest.mark.process
@go
async def test_a_cancelled_job_stays_until_its_worker_is_gone(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        context = made.context
        context.config = Config(options=AgentOptions(keep_jobs=0))
        job, tasks = made.add("birds", LONG), BackgroundTasks(context)
        Dispatcher(context).act(TRAIN)
        await made.until(lambda: context.runners.host.phase is WorkerPhase.TRAINING)
        context.store.save(replace(context.store.get(job.id), state=JobState.CANCELLED))
        await tasks.keep_house()
        assert context.runners.host.job is not None and (context.store.job_dir(job.id) / "state").is_dir()
        context.runners.host.cancel()
        await made.until(lambda: context.runners.host.job is None)
        await tasks.keep_house()
        assert context.store.all() == []


@go
async def test_damaged_notes_of_an_inbox_are_shown(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        context = made.context
        job = made.add("birds", waits_for_data=True)
        (context.store.job_dir(job.id) / "consumed.json").write_text('{"a.txt":[3,')
        await BackgroundTasks(context).scan_inboxes()
        (item,) = context.health.items(made.clock.now)
        assert item.code == "inbox-forgotten" and "birds" in item.text and "consumed.json is damaged" in item.text


def test_a_failed_job_that_is_resumed_while_sizes_are_counted_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep_house() -> list[str]:
        loop, counting, resumed = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def count_slowly(directory: Path) -> int:
            loop.call_soon_threadsafe(counting.set)
            resumed.wait()
            return 0

        monkeypatch.setattr(background_tasks, "_tree_bytes", count_slowly)
        async with parts(tmp_path) as made:
            store = made.context.store
            made.context.config = Config(options=AgentOptions(keep_jobs=0))
            failed, other = made.add("birds"), made.add("cats")
            for job in (failed, other):
                store.save(replace(job, state=JobState.FAILED))
            house = asyncio.create_task(BackgroundTasks(made.context).keep_house())
            await counting.wait()
            store.save(replace(failed, state=JobState.QUEUED))
            resumed.set()
            await house
            return [job.label for job in store.all()]

    assert asyncio.run(asyncio.wait_for(keep_house(), 60.0)) == ["1 (birds)"]
