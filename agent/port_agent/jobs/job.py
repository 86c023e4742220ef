"""What a job is, what its states mean, and the pure rules that choose the next job and the wait after a failure."""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Any

import msgspec

from port_planner.base.errors import PortError
from port_planner.base.times import LATEST_UNIX

RECORD_VERSION = 1
BACKOFF_FIRST_S = 30.0
BACKOFF_LONGEST_S = 5 * 3600.0
"""Longest wait after a failure, in seconds; Android's JobScheduler uses the same two numbers
for its exponential backoff.
"""

_NAME_LENGTH = 63
NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{_NAME_LENGTH - 1}}}")
"""Pattern of a job's name, which becomes a directory name of the inbox."""

MAX_STEPS = 2**53
"""Largest number of steps, epochs and steps between checkpoints: the largest whole number that every JSON reader
represents exactly."""


def name_like(text: str) -> str:
    """Return a job name that resembles `text`, such as the stem of a file."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")
    return name[:_NAME_LENGTH] or "job"


class JobRequestError(PortError):
    """A request does not fit the job, or its state."""

    def __init__(self, message: str, job_id: int | None = None) -> None:
        self.job_id = job_id
        super().__init__(message)


class JobNotFoundError(JobRequestError):
    """There is no job with this id or name."""

    def __init__(self, name: str, job_id: int | None = None) -> None:
        super().__init__(f"there is no job {name}; see `port-agent job list`", job_id)


class JobState(IntEnum):
    """State of a job on disk and in the control protocol: never renumber."""

    QUEUED = 1
    """Ready to run as soon as the conditions allow."""
    WAITING_DATA = 2
    """Waits for new files in its inbox, or for the next round of a federation."""
    RUNNING = 3
    """Has a worker process, training or paused in memory."""
    PAUSED = 4
    """Held by the user."""
    BACKOFF = 5
    """Waits after a failure."""
    FINISHED = 6
    FAILED = 7
    """The job was given up; `reason` says why."""
    CANCELLED = 8
    AWAY = 9
    """A paired device has it; it runs nowhere else."""

    @property
    def is_over(self) -> bool:
        """Whether the job will never run again."""
        return self in (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)


class JobKind(Enum):
    """Which worker runs the job."""

    TRAIN = "train"
    MCU = "mcu"
    FINETUNE = "finetune"
    """A language model with the fixed training loop, over the user's files in place; the bundle names them."""
    ATTACHED = "attached"
    """A program of a user that attached itself (`port-agent exec --opportunistic`); nobody else can start it."""


class Migratable(Enum):
    """Whether a job may move to a paired device, and why."""

    NEVER = "never"
    SOONEST = "soonest"
    """The device that finishes the job first."""
    CHEAPEST = "cheapest"
    """The device that uses the fewest joules."""


class AwayPhase(Enum):
    """The stage of a job that moves to a paired device."""

    SENDING = "sending"
    """The job's files are being sent; it has not been handed over."""
    THERE = "there"
    """The other device has it, or may have it: only its answer, or the user's force, brings the job back."""
    CLOSING = "closing"
    """The job is back; the other device must still delete it."""


@dataclass(frozen=True, slots=True)
class Away:
    """Where a job is: on the paired device of this id and name, known there by `token`."""

    device: str
    name: str
    token: str
    phase: AwayPhase
    recalled: bool = False


@dataclass(frozen=True, slots=True)
class Guest:
    """The owner of a job that came from a paired device: its name `owner`, its id `device`.

    The job is known by `token`.
    """

    owner: str
    token: str
    device: str


class WorkerOutcome(Enum):
    """Why a worker process ended."""

    FINISHED = "finished"
    WRITTEN = "the federation's average is written"
    LEFT = "left on request"
    OUT_OF_MEMORY = "out of memory"
    CRASHED = "crashed"
    FAILED = "failed"
    IMPOSSIBLE = "impossible"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class FederationTerms:
    """Conditions that the owner of a federated job sets for the device that leads its rounds."""

    leader: str = ""
    """The id of the paired device that may lead it besides this one; "" for none."""
    leader_name: str = ""
    """Name of that device when the job was submitted."""
    require_secure: bool = False
    """Whether the job contributes only to masked sums."""
    require_clip: float | None = None
    """The largest norm of its change that it sends; None: any."""
    epsilon_budget: float | None = None
    """Largest epsilon that the job's data may spend over its life; None: no limit."""
    max_rounds: int | None = None
    """Largest number of rounds that the job trains; None: no limit."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What the user asked for."""

    name: str
    bundle: str | None
    """Path of the bundle; below the job's own directory when it was uploaded."""
    kind: JobKind = JobKind.TRAIN
    data: str | None = None
    epochs: int | None = None
    steps: int | None = None
    checkpoint_every: int | None = None
    priority: int = 0
    deadline_at: float | None = None
    """Unix time, because only a wall clock can express "by seven tomorrow"."""
    waits_for_data: bool = False
    federated: bool = False
    """Name of a federation.

    The job trains a round only when the device that leads this federation, by its `terms`, asks for it.
    """
    terms: FederationTerms = FederationTerms()
    page_dirs: tuple[str, ...] = ()
    """Directories for pages, one on each medium for which the bundle was planned; empty: the job's own directory."""
    arguments: tuple[str, ...] = ()
    """Arguments passed to the worker unchanged (microcontroller jobs)."""
    owner: str | None = None
    """The user of an attached program, or the user who submitted a fine-tuning, according to the kernel."""
    movable: Migratable = Migratable.NEVER
    guest: Guest | None = None
    """Set if the job came from a paired device."""
    submission: str = ""
    """The client's id of the request: the same id again means this job, not another one."""


@dataclass(frozen=True, slots=True)
class JobMeasurements:
    """What the supervisor learned about a job's worker; None until it has run."""

    step_s: float | None = None
    checkpoint_s: float | None = None
    checkpoint_bytes: int | None = None
    peak_rss_bytes: int | None = None
    device_peak_bytes: int | None = None
    """Peak of a GPU's memory."""


@dataclass(frozen=True, slots=True)
class JobPromise:
    """What was promised when the job was submitted: the plan of an ordinary day, and this device's usual times.

    `step_joules` and `written_bytes` are of one step. `steps` is None if the data is not in the bundle. `ends_at` (Unix
    time) and `nights`, the nights until then, are None also if this device's usual times were not known yet.
    """

    plan: int
    peak_bytes: int
    step_s: float
    step_joules: float
    written_bytes: int
    steps: int | None = None
    ends_at: float | None = None
    nights: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job and all that is known about it; replaced, never changed."""

    id: int
    spec: JobSpec
    submitted_at: float
    state: JobState = JobState.QUEUED
    reason: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    plan: int | None = None
    memory_ceiling_bytes: int | None = None
    """Bytes that plans must stay below, a device's own memory included: a plan of that size was
    killed for lack of memory.
    """
    attempts: int = 0
    failures: int = 0
    """Failures in a row without a step of progress."""
    failed_at_step: int = 0
    retry_after_s: float | None = None
    trained_s: float = 0.0
    planned_joules: float | None = None
    written_bytes: int = 0
    """Bytes written to flash: pages and checkpoints."""
    rounds: int = 0
    """Finished rounds of a job that waits for data."""
    measured: JobMeasurements = field(default_factory=JobMeasurements)
    result: str | None = None
    result_checksum: str | None = None
    """Checksum of the result's file as written; None if the worker did not report it."""
    promise: JobPromise | None = None
    away: Away | None = None
    """Set while a paired device has the job, or still has files of it."""

    @property
    def label(self) -> str:
        """Return the job's name for people: `3 (birds)`."""
        return f"{self.id} ({self.spec.name})"


def to_record(job: Job) -> dict[str, Any]:
    """Return plain values for disk and wire; states as numbers."""
    record: dict[str, Any] = msgspec.to_builtins(job)
    return {"v": RECORD_VERSION, **record}


def from_record(record: Mapping[str, Any]) -> Job:
    """Return the job that `to_record` wrote; fields of a later agent are skipped.

    Raises JobRequestError if the record has another version, is incomplete, or has a value of the wrong type.
    """
    if record.get("v") != RECORD_VERSION:
        raise JobRequestError(f"job record of version {record.get('v')!r}; this agent reads version {RECORD_VERSION}")
    try:
        return msgspec.convert(record, Job)
    except msgspec.ValidationError as error:
        raise JobRequestError(f"job record cannot be read: {error}") from error


def check_spec(spec: JobSpec) -> JobSpec:
    """Return `spec` if it can run; raises JobRequestError that says what is wrong."""
    if not NAME.fullmatch(spec.name):
        raise JobRequestError(f"job name {spec.name!r}: use up to 63 of a-z 0-9 . _ - beginning with a letter or digit")
    if spec.kind is JobKind.TRAIN and not spec.bundle:
        raise JobRequestError("a training job needs a bundle; make one with `port-agent plan`")
    if spec.kind is JobKind.FINETUNE:
        _check_finetune(spec)
    if spec.epochs is not None and spec.steps is not None:
        raise JobRequestError(f"give epochs ({spec.epochs}) or steps ({spec.steps}), not both")
    for name in ("epochs", "steps", "checkpoint_every"):
        value = getattr(spec, name)
        if value is not None and value < 1:
            raise JobRequestError(f"{name} is {value}; it must be at least 1")
        if value is not None and value > MAX_STEPS:
            raise JobRequestError(f"{name} is a number above 2^53 ({MAX_STEPS}); give one that can be reached")
    if not -100 <= spec.priority <= 100:
        raise JobRequestError(f"priority {spec.priority} is not between -100 and 100")
    if spec.deadline_at is not None and not 0 <= spec.deadline_at <= LATEST_UNIX:
        raise JobRequestError("the deadline is not between 1970 and 2100; give a date in this range")
    if spec.federated and (spec.kind not in (JobKind.TRAIN, JobKind.FINETUNE) or spec.waits_for_data):
        raise JobRequestError(
            "only a fine-tuning, or a training job on its own or --data's samples, can be federated; submit it without "
            "--inbox"
        )
    _check_terms(spec)
    if spec.movable is not Migratable.NEVER and (
        spec.kind is not JobKind.TRAIN or spec.waits_for_data or spec.federated or spec.page_dirs
    ):
        raise JobRequestError(
            "only a training job with all its data can move; submit it without --inbox, --federated and --page-dir"
        )
    if spec.waits_for_data and spec.data:
        raise JobRequestError("a job takes its data from --data or from its inbox; give one of them")
    for name, words in (
        ("bundle", [spec.bundle]),
        ("data", [spec.data]),
        ("page_dirs", spec.page_dirs),
        ("arguments", spec.arguments),
    ):
        for word in words:
            if word is not None and not _can_be_an_argument(word):
                raise JobRequestError(f"{name} {word!r} cannot be passed to a program; remove the null character")
    return spec


def _check_terms(spec: JobSpec) -> None:
    terms = spec.terms
    if terms != FederationTerms() and not spec.federated:
        raise JobRequestError("a leader and its limits are for a federated job; submit it with --federated")
    if terms.require_clip is not None and not 0 < terms.require_clip < math.inf:
        raise JobRequestError(f"a change cannot be clipped to a norm of {terms.require_clip}; give a number above zero")
    if terms.epsilon_budget is not None and not 0 < terms.epsilon_budget < math.inf:
        raise JobRequestError(f"an epsilon budget of {terms.epsilon_budget} is not valid; give a number above zero")
    if terms.epsilon_budget is not None and terms.require_secure:
        raise JobRequestError("masked sums have no noise yet; give --require-secure or --epsilon-budget")
    if terms.require_clip is not None and terms.require_secure:
        raise JobRequestError("masked sums have no clipping yet; require one of them")
    if terms.max_rounds is not None and terms.max_rounds < 1:
        raise JobRequestError(f"{terms.max_rounds} rounds; give at least 1")


def _check_finetune(spec: JobSpec) -> None:
    if not spec.bundle:
        raise JobRequestError("a fine-tuning needs its job file; submit it with `port-agent finetune --submit`")
    given = [
        name for name in ("data", "epochs", "steps", "page_dirs", "waits_for_data", "arguments") if getattr(spec, name)
    ]
    if given:
        raise JobRequestError(f"{given[0]} of a fine-tuning is fixed when it is submitted; submit it again")


def _can_be_an_argument(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def backoff_s(failures: int) -> float:
    """Return how long to wait after the n-th failure in a row: 30 s, 60 s, ... 5 h."""
    return min(BACKOFF_LONGEST_S, BACKOFF_FIRST_S * 2.0 ** min(max(failures, 1) - 1, 30))


def may_run(job: Job, *, has_data: bool, waited: bool) -> bool:
    """Return whether the job could start now, apart from the device's conditions.

    `waited`: whether its backoff is over; only the supervisor has a clock that does not jump.
    """
    if job.state in (JobState.QUEUED, JobState.RUNNING):
        return True
    if job.state is JobState.BACKOFF:
        return waited
    return job.state is JobState.WAITING_DATA and has_data


def order(jobs: Iterable[Job]) -> list[Job]:
    """Return jobs in the order in which they run: by priority, then earlier deadline, then age."""
    return sorted(
        jobs, key=lambda job: (-job.spec.priority, job.spec.deadline_at or float("inf"), job.submitted_at, job.id)
    )


def after_exit(job: Job, outcome: WorkerOutcome, detail: str, give_up_after: int, smaller_plan: int | None) -> Job:
    """Return the job after its worker ended.

    `smaller_plan` is the plan to try next after running out of memory.
    """
    if outcome is WorkerOutcome.LEFT:
        return replace(job, state=JobState.QUEUED, reason=detail)
    if outcome is WorkerOutcome.FINISHED:
        return _finished(job, detail)
    if outcome is WorkerOutcome.WRITTEN:
        waits = f"{detail}; waiting for the next round"
        return replace(job, state=JobState.WAITING_DATA, reason=waits, failures=0, failed_at_step=0)
    if outcome is WorkerOutcome.CANCELLED:
        return replace(job, state=JobState.CANCELLED, reason=detail)
    if outcome is WorkerOutcome.IMPOSSIBLE or job.spec.kind is JobKind.ATTACHED:
        return replace(job, state=JobState.FAILED, reason=detail)
    failures = 1 if job.step > job.failed_at_step else job.failures + 1
    job = replace(job, failures=failures, failed_at_step=job.step)
    if failures >= give_up_after:
        reason = f"given up after {failures} failures without a step of progress; last: {detail}"
        return replace(job, state=JobState.FAILED, reason=reason)
    if outcome is WorkerOutcome.OUT_OF_MEMORY and smaller_plan is not None:
        return replace(job, state=JobState.QUEUED, plan=smaller_plan, reason=f"{detail}; next with a smaller plan")
    wait_s = backoff_s(failures)
    return replace(job, state=JobState.BACKOFF, retry_after_s=wait_s, reason=detail)


def _finished(job: Job, detail: str) -> Job:
    done = replace(job, failures=0, failed_at_step=job.step, rounds=job.rounds + 1)
    if job.spec.waits_for_data:
        done = replace(done, failed_at_step=0)  # the next round counts its steps from zero
        return replace(done, state=JobState.WAITING_DATA, reason=f"round {done.rounds} finished; waiting for new data")
    if job.spec.federated:
        done = replace(done, failed_at_step=0)
        return replace(done, state=JobState.WAITING_DATA, reason=f"round {done.rounds} trained; waiting for the next")
    return replace(done, state=JobState.FINISHED, reason=detail)
