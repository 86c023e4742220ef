"""The answers of the control interface, version 1: frozen values that the server writes as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from port_agent.health.conditions import HealthItem
from port_agent.jobs.job import Job, to_record
from port_agent.jobs.store import HistoryEntry

API_VERSION = 1
Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class JobSummary:
    """One line about a job. Spans in seconds, moments in Unix time."""

    id: int
    name: str
    kind: str
    state: str
    state_number: int
    reason: str
    step: int
    total_steps: int | None
    loss: float | None
    priority: int
    deadline_at: float | None
    retry_in_s: float | None
    eta_s: float | None
    submitted_at: float
    owner: str | None = None
    """User whose process an attached program is; None for other jobs."""
    on: str | None = None
    """The paired device that has it."""
    guest_of: str | None = None
    """The paired device from which it came."""


@dataclass(frozen=True, slots=True)
class JobDetail:
    """Everything about a job."""

    job: Job
    summary: JobSummary
    history: tuple[HistoryEntry, ...]
    directory: Path
    inbox: Path | None
    metered_step_joules: float | None = None
    """Joules of a step on average, since the agent started; None if nothing was metered."""
    metered_joules: float | None = None
    """Joules that the job used since the agent started, without idle power; None if nothing was metered."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        history = [{"at": entry.at, "kind": entry.kind, "text": entry.text} for entry in self.history]
        places = {"directory": str(self.directory), "inbox": str(self.inbox) if self.inbox else None}
        metered = {"metered_step_joules": self.metered_step_joules, "metered_joules": self.metered_joules}
        return to_record(self.job) | asdict(self.summary) | {"history": history, **places, **metered}


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A job that has a worker, and the state of that worker."""

    id: int
    name: str
    kind: str
    phase: str
    requested: str
    """Last request of the supervisor to the worker: train, pause or leave."""
    pid: int
    step: int
    total_steps: int | None
    loss: float | None
    step_s: float | None
    eta_s: float | None
    plan: int | None
    plans: int
    planned_peak_bytes: int | None
    memory_limit_bytes: int | None
    peak_rss_bytes: int | None
    planned_joules: float | None
    deadline_at: float | None
    waits_for: str | None = None
    """Why it cannot continue although it is allowed to, such as a missing board."""
    owner: str | None = None
    """User whose process an attached program is; None for other jobs."""
    step_written_bytes: int | None = None
    """Bytes that a step writes to flash, by its plan."""
    planned_device_bytes: int | None = None
    """Planned bytes of a device's own memory, which are not part of `planned_peak_bytes`; None if it has none."""
    device_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FlashLife:
    """How long the medium of the state directory lasts."""

    medium: str
    endurance_bytes: int
    """Bytes that the medium endures; `assumed` from its kind and size if not configured."""
    assumed: bool
    used_share: float | None
    """Share of its life used, by its own registers; None if it does not report it."""
    left_bytes: int
    bytes_per_day: float
    """Bytes that the agent writes per day, averaged over yesterday and today."""
    years_left: float | None
    """Years until the medium is worn out at that rate; None while nothing is written."""


@dataclass(frozen=True, slots=True)
class IdleSignalState:
    """What one sensor reports: yes, no or unknown to whether the device is idle."""

    name: str
    idle: str
    detail: str


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The sensors' readings."""

    power: str
    power_detail: str
    battery_percent: float | None
    temperature_c: float | None
    throttled: str
    idle_signals: tuple[IdleSignalState, ...]
    free_disk_bytes: int | None
    available_memory_bytes: int | None
    memory_pressure_percent: float | None
    online: str
    metered: str


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """Everything that one screen shows."""

    time: float
    uptime_s: float
    state: str
    may_train: bool
    reasons: tuple[str, ...]
    conditions: tuple[str, ...]
    codes: tuple[str, ...]
    paused_until: float | None
    job: RunStatus | None
    """The run that represents the whole agent: this computer's, or a board's if there is none."""
    running: tuple[RunStatus, ...]
    """All jobs that have a worker, this computer's first."""
    waiting: tuple[JobSummary, ...]
    facts: DeviceState
    flash_written_today_bytes: int
    flash_budget_bytes: int
    flash_life: FlashLife | None
    """Estimated life of the flash; None for a medium that writing does not wear out."""
    next_window: float | None
    sleep: str
    """Whether the agent prevents sleep, or the reason why it does not."""
    usual_day_s: float | None
    """Seconds of training on an average day; None until a day was observed."""
    energy: Row | None
    health: tuple[HealthItem, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain values; two names are kept from the beginning of version 1."""
        plain = {"v": API_VERSION, **asdict(self), "health": [item.as_json() for item in self.health]}
        plain["facts"]["voices"] = plain["facts"].pop("idle_signals")
        for run in (*plain["running"], *([] if plain["job"] is None else [plain["job"]])):
            run["wish"] = run.pop("requested")
        return plain


@dataclass(frozen=True, slots=True)
class SettingsInForce:
    """The configuration after a reload, and the names of settings that take effect at the next start."""

    settings: Row
    after_restart: tuple[str, ...]
