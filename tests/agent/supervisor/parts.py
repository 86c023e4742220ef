"""The parts of a supervisor without its loop: real store, sensors of plain files, a set clock, the test worker."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from port_agent.energy.wear_account import WearAccount
from port_agent.health.conditions import HealthBoard
from port_agent.jobs.job import Job, JobSpec
from port_agent.jobs.store import JobStore
from port_agent.peers.connection.messages import Heartbeat
from port_agent.peers.exchange.answers import PeerClient
from port_agent.policy.config import Config
from port_agent.policy.decide import Memory, Policy, PolicyDecision, State
from port_agent.policy.usual_times import UsualTimes
from port_agent.supervisor.admission import Admission
from port_agent.supervisor.context import DaemonContext, Settings
from port_agent.supervisor.job.inbox import Inboxes
from port_agent.supervisor.job.runner import Runner
from port_agent.supervisor.job.runners import Runners
from port_agent.supervisor.pause import Pause
from port_agent.supervisor.peers.peer_answers import FederatedContext
from port_agent.supervisor.peers.peers import Peers
from port_agent.supervisor.sleep_inhibitor import SleepInhibitor
from port_agent.supervisor.timeline import Timeline
from port_agent.supervisor.timers import Timers
from tests.agent.facts.machines import linux
from tests.agent.live import KINDS, seams
from tests.agent.live_daemon import BUNDLE
from tests.agent.set_clock import SetClock

ANY_TIME = Policy(
    idle_for_s=0.0, min_pause_s=0.0, min_free_disk_bytes=0, min_free_memory_bytes=0, train_while_in_use=True
)
TRAIN = PolicyDecision(State.TRAIN, (), (), Memory())
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Parts:
    """A core, its clock, and how often a reload was asked for; every change of the run wakes the core."""

    context: DaemonContext
    clock: SetClock
    reloads: list[None]

    def add(self, name: str, bundle: dict[str, Any] = BUNDLE, **spec: Any) -> Job:
        """Put a job into the store."""

        def write(directory: Path) -> None:
            (directory / "bundle.json").write_text(json.dumps(bundle))

        return self.context.store.add(JobSpec(name, "bundle.json", **spec), self.clock.wall, write)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a change of the run makes `condition` true."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.context.wake.clear()
                await self.context.wake.wait()


async def nothing_moves(client: PeerClient, request: bytes) -> bytes:
    return b""


@asynccontextmanager
async def parts(root: Path, policy: Policy = ANY_TIME) -> AsyncIterator[Parts]:
    """Put the parts together; at the end the worker, if there is one, is killed."""
    (root / "state").mkdir(parents=True)
    clock, health, wake, reloads = SetClock(), HealthBoard(), asyncio.Event(), list[None]()
    store, inboxes = JobStore(root / "state"), Inboxes(root / "state/inbox")
    config = Config(policy=policy)
    context = DaemonContext(
        settings=Settings(root / "state", root / "run"),
        seams=seams(),
        config=config,
        started_with=config,
        clock=clock,
        health=health,
        store=store,
        inboxes=inboxes,
        admission=Admission(linux(root), clock, health, root),
        runners=Runners(
            store, root / "state", lambda lock: Runner(store, inboxes, health, clock, KINDS, lock, wake.set)
        ),
        timers=Timers(wake.set),
        wake=wake,
        started_s=clock.now,
        reload=lambda: reloads.append(None),
        peers=Peers(
            root / "state",
            health,
            clock,
            store,
            lambda name: Heartbeat(name=name, board="", state="idle"),
            lambda: "",
            FederatedContext(lambda: "", lambda job: None, wake.set),
            nothing_moves,
        ),
        wear=WearAccount(clock.wall_s, store),
        usual_times=UsualTimes(),
        pause=Pause(root / "state", clock),
        timeline=Timeline(root / "state"),
        sleep=SleepInhibitor(lambda what: None, clock.monotonic_s),
    )
    made = Parts(context, clock, reloads)
    try:
        yield made
    finally:
        context.runners.kill()
        await made.until(lambda: not context.runners.busy())
        context.timers.stop()
        store.close()
