"""The parts of a running supervisor, which its loop and its control interface share."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from port_agent.energy.media import Medium
from port_agent.energy.meter import EnergyMeter
from port_agent.energy.wear_account import WearAccount
from port_agent.facts import Platform
from port_agent.health.conditions import HealthBoard
from port_agent.jobs.job import JobKind, JobState
from port_agent.jobs.store import JobStore
from port_agent.policy.config import Config
from port_agent.policy.decide import Policy
from port_agent.policy.usual_times import UsualTimes
from port_agent.supervisor.admission import Admission
from port_agent.supervisor.job.inbox import Inboxes
from port_agent.supervisor.job.runners import Runners
from port_agent.supervisor.job.worker_kinds import DEFAULT_KINDS, WorkerKind
from port_agent.supervisor.pause import Pause
from port_agent.supervisor.peers.peers import Peers
from port_agent.supervisor.run_now import RunNow, without_waiting
from port_agent.supervisor.sleep_inhibitor import SleepInhibitor
from port_agent.supervisor.timeline import Timeline
from port_agent.supervisor.timers import Timers
from port_agent.system.clock import Clock, SystemClock

PAUSE_SETTING = "paused"
USUAL_TIMES_SETTING = "usual-times"
HINT_SETTING = "idle-hint-works"


@dataclass(frozen=True, slots=True)
class Settings:
    """The daemon's directories and files. `sysfs_root` overrides the configuration's."""

    state_dir: Path
    runtime_dir: Path
    config: Path | None = None
    sysfs_root: Path | None = None


@dataclass(frozen=True, slots=True)
class DaemonSeams:
    """Parts that tests replace: clocks, workers, sensors, and the longest rest of the loop."""

    clock: Clock = field(default_factory=SystemClock)
    kinds: Mapping[JobKind, WorkerKind] = field(default_factory=lambda: DEFAULT_KINDS)
    platform: Callable[[Config, Settings], Platform] | None = None
    inbox_scan_s: float = 10.0
    waiting_look_s: float = 2.0
    training_look_s: float = 1.0
    offer_every_s: float = 15.0
    """Seconds between offers of movable jobs to paired devices."""
    away_look_s: float = 2.0
    """Seconds between queries to a paired device about the state of a job there."""


@dataclass(slots=True)
class DaemonContext:
    """A supervisor's parts."""

    settings: Settings
    seams: DaemonSeams
    config: Config
    """The current configuration; control socket and meter were created from `started_with`."""
    started_with: Config
    clock: Clock
    health: HealthBoard
    store: JobStore
    inboxes: Inboxes
    admission: Admission
    runners: Runners
    timers: Timers
    wake: asyncio.Event
    started_s: float
    reload: Callable[[], None]
    peers: Peers
    wear: WearAccount
    usual_times: UsualTimes
    pause: Pause
    timeline: Timeline
    sleep: SleepInhibitor
    medium: Medium | None = None
    """The medium of the state directory, and the share of its life that it reports as used; None if unknown."""
    used_life: float | None = None
    meter: EnergyMeter | None = None
    run_now: RunNow | None = None
    """The job that the user wants to run now; None: jobs run in order, when the policy allows."""
    retry_at_s: dict[int, tuple[int, float]] = field(default_factory=dict)
    """End of a job's backoff, by job id: the number of failures to which it belongs, and the
    monotonic time in seconds.
    """
    without_board: dict[int, frozenset[str]] = field(default_factory=dict)
    """Jobs whose board is missing, by id, with the serial devices that were present at that time."""

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.config.policy if self.run_now is None else without_waiting(self.config.policy)

    def end_run_now(self) -> None:
        """Forget a job that had to run now, once it has ended or its time is over."""
        now = self.run_now
        if now is None:
            return
        job = next((job for job in self.store.all() if job.id == now.job_id), None)
        if job is None or job.state.is_over or job.state is JobState.PAUSED or self.clock.uptime_s() >= now.until_s:
            self.run_now = None
