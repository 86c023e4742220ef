"""One run of a job: its worker process, its plan, its limits, and its run conditions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from port_agent.control.http_answers import RunStatus
from port_agent.jobs.job import Job
from port_agent.policy.decide import ResourceLimits
from port_agent.supervisor.job.attachments import AttachedProgram
from port_agent.supervisor.job.log import JobLog
from port_agent.supervisor.job.plan_choice import PlanFigures, eta_s, memory_max
from port_agent.supervisor.job.plan_revision import PeerSolving, PlanRevision
from port_agent.supervisor.job.sharing import CpuShare
from port_agent.supervisor.job.silence_monitor import SilenceMonitor
from port_agent.supervisor.job.worker_process import WorkerProcess
from port_agent.system.cgroup import LOW_IO_WEIGHT, LOWEST_CPU_WEIGHT, WorkerLimits
from port_agent.worker.protocol import Event


class Meter(Protocol):
    """What the energy meter needs to learn about a running job."""

    def on_worker_start(self, job: str, now_s: float, label: str, cpu_s: Callable[[], float]) -> None:
        """Record that a worker was started; `cpu_s` returns its CPU seconds so far."""

    def on_worker_stop(self, job: str, now_s: float) -> None:
        """Record that the worker has ended."""

    def on_event(self, job: str, event: Event, now_s: float) -> None:
        """Record an event from the worker of a job."""


@dataclass(frozen=True, slots=True)
class RunConditions:
    """What a run depends on: limits, memory, heat, and the settings about jobs."""

    limits: ResourceLimits
    total_memory_bytes: int | None
    warm: bool = False
    flash_budget_bytes_per_day: int = 1 << 32
    flash_written_today_bytes: int = 0
    give_up_after: int = 6
    job_log_bytes: int = 1 << 20
    taken_bytes: int = 0
    """Memory in bytes that the other workers have or may take."""
    cpu: CpuShare = field(default_factory=CpuShare)
    devices: frozenset[str] | None = None
    """Kinds of devices other than the CPU; None if unknown."""
    solving: PeerSolving | None = None
    """The device that solves when plans are made again; None: this device."""

    @property
    def memory_bytes(self) -> int | None:
        """Memory in bytes for the worker beside the others; None without a limit."""
        granted = self.limits.memory_limit(self.total_memory_bytes)
        return None if granted is None else max(0, granted - self.taken_bytes)

    @property
    def flash_left_bytes(self) -> int:
        """Bytes that may still be written to flash today."""
        return max(0, self.flash_budget_bytes_per_day - self.flash_written_today_bytes)

    def worker_limits(self, plan: PlanFigures | None) -> WorkerLimits:
        """Return the limits of a worker that runs `plan`; a worker without a plan may take
        everything that is allowed.
        """
        memory, weight = memory_max(plan.peak_bytes) if plan else self.memory_bytes, 1 << self.cpu.rank
        return WorkerLimits(
            memory, self.limits.cpu_percent * self.cpu.share, LOWEST_CPU_WEIGHT * weight, LOW_IO_WEIGHT * weight
        )


@dataclass(slots=True)
class WorkerRun:
    """The state of one worker process."""

    job_id: int
    worker: WorkerProcess | AttachedProgram
    log: JobLog
    plans: tuple[PlanFigures, ...]
    plan: int | None
    granted: PlanFigures | None
    """The plan whose memory its cgroup allows; during a change of plan, the larger one."""
    limits: WorkerLimits
    """The limits of its cgroup, if it has one."""
    round: int | None
    last_checkpoint_s: float
    last_flush_s: float
    switched_at_s: float
    silence: SilenceMonitor
    revision: PlanRevision | None = None
    """Plans again if costs differ from the plan; None if the run has no plans, or cannot plan again."""
    last_step_s: float | None = None
    """Time of the newest step's report; None after a pause, which is not part of a step."""
    pressed_until_s: float = 0.0
    """Time until which no larger plan is used, because the system was short of memory."""
    corrected_s: float | None = None
    """Time at which a correction of its plans' figures was last stored."""
    farewell_at_s: float | None = None
    """Time at which the worker was asked for a last checkpoint, after which it leaves."""
    waits_for: str | None = None
    """Why its worker cannot continue although it is allowed to, such as a missing board."""
    waits_since_s: float | None = None
    left_because: str = ""
    """Why it was asked to leave."""
    out: str | None = None
    out_checksum: str | None = None

    @property
    def figures(self) -> PlanFigures | None:
        """The plan that it runs; None if there is none."""
        return next((plan for plan in self.plans if plan.index == self.plan), None)

    @property
    def peak_bytes(self) -> int:
        """The peak of its plan in bytes; 0 without one."""
        return self.figures.peak_bytes if self.figures else 0

    @property
    def all_bytes(self) -> int:
        """The peak of its plan, plus a device's own memory, in bytes."""
        return self.figures.all_bytes if self.figures else 0

    @property
    def shown_phase(self) -> str:
        """The worker's activity, in a word for people."""
        return "stuck" if self.silence.stuck else self.worker.phase.value

    def status(self, job: Job) -> RunStatus:
        """Return the run as `status` shows it."""
        return RunStatus(
            id=job.id,
            name=job.spec.name,
            kind=job.spec.kind.value,
            phase=self.shown_phase,
            waits_for=self.waits_for,
            requested=self.worker.requested.value,
            pid=self.worker.pid,
            step=job.step,
            total_steps=job.total_steps,
            loss=job.loss,
            step_s=job.measured.step_s,
            eta_s=eta_s(job.step, job.total_steps, job.measured.step_s),
            plan=self.plan,
            plans=len(self.plans),
            planned_peak_bytes=self.peak_bytes or None,
            planned_device_bytes=(self.figures.device_bytes if self.figures else 0) or None,
            memory_limit_bytes=self.limits.memory_bytes if self.worker.group else None,
            peak_rss_bytes=job.measured.peak_rss_bytes,
            device_peak_bytes=job.measured.device_peak_bytes,
            planned_joules=job.planned_joules,
            deadline_at=job.spec.deadline_at,
            owner=job.spec.owner,
            step_written_bytes=self.figures.written_bytes if self.figures else None,
        )
