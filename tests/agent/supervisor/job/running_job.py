"""A runner with a real store and a real worker process, without a daemon around it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from port_agent.health.conditions import HealthBoard
from port_agent.jobs.job import Job, JobKind, JobSpec
from port_agent.jobs.store import JobStore
from port_agent.policy.decide import ResourceLimits
from port_agent.supervisor.job.inbox import Inboxes
from port_agent.supervisor.job.run_state import RunConditions
from port_agent.supervisor.job.runner import Runner
from port_agent.supervisor.job.worker_kinds import WorkerKind
from port_agent.system.clock import SystemClock
from port_agent.system.locks import LockFile
from tests.agent.live import KINDS

ROOMY = RunConditions(ResourceLimits(memory_bytes=2 << 30), 4 << 30)
PATIENCE_S = 120.0


class RunningJob:
    """One job and what steers it; whatever the worker says but a step sets an event that a test awaits."""

    def __init__(
        self, root: Path, bundle: dict[str, Any] | Path, kinds: Mapping[JobKind, WorkerKind] = KINDS, **spec: Any
    ) -> None:
        self.store, self.health = JobStore(root), HealthBoard()
        self._changed = asyncio.Event()
        self.runner = Runner(
            self.store,
            Inboxes(root / "inbox"),
            self.health,
            SystemClock(),
            kinds,
            lambda: LockFile(root / "worker.lock"),
            self._changed.set,
        )
        content = bundle.read_bytes() if isinstance(bundle, Path) else json.dumps(bundle).encode()
        self.id = self.store.add(
            JobSpec("birds", "bundle", **spec), 0.0, lambda folder: put(folder / "bundle", content)
        ).id

    @property
    def job(self) -> Job:
        """The job as it is now."""
        return self.store.get(self.id)

    def start(self, conditions: RunConditions = ROOMY) -> bool:
        """Start its worker."""
        return self.runner.start(self.job, conditions)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a change of the run makes `condition` true."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def over(self) -> Job:
        """Wait for the end of the worker."""
        await self.until(lambda: self.runner.job is None)
        return self.job

    def history(self) -> list[str]:
        """Return the kinds of entries in the job's history."""
        self.store.flush()
        return [entry.kind for entry in self.store.history(self.id)]


def put(path: Path, content: bytes) -> None:
    """Write a file."""
    path.write_bytes(content)


@asynccontextmanager
async def running_job(root: Path, bundle: dict[str, Any] | Path, **spec: Any) -> AsyncIterator[RunningJob]:
    """Give a job that is not started yet; its worker ends with it."""
    made = RunningJob(root, bundle, **spec)
    try:
        yield made
    finally:
        made.runner.kill()
        await made.over()
        made.store.close()
