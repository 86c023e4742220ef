"""Several runners: which are there, and for how long."""

import asyncio
from pathlib import Path

import pytest

from port_agent.supervisor.job.runners import worker_lock
from tests.agent.live_daemon import LONG, go
from tests.agent.supervisor.parts import parts

pytestmark = pytest.mark.process


@go
async def test_boards_have_a_runner_while_they_have_a_job(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        runners = made.context.runners
        first, second = runners.at("/dev/a"), runners.at("/dev/b")
        assert list(runners) == [runners.host, first, second] and runners.at("/dev/a") is first
        job = made.add("birds", LONG)
        assert second.start(job, first._conditions)
        runners.tidy()
        assert list(runners) == [runners.host, second] and runners.of_job(job.id) is second
        assert runners.shown is second and [run.id for run in runners.statuses()] == [job.id]
        assert worker_lock(tmp_path / "state", 2).exists() and not worker_lock(tmp_path / "state", 0).exists()
        assert runners.at("/dev/c") not in (runners.host, first, second)
        runners.kill()
        await made.until(lambda: not runners.busy())
        await asyncio.sleep(0)
        assert runners.take_written_bytes() >= 0 and runners.shown is runners.host
