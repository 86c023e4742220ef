"""The requests that a user can make of a running supervisor, with typed answers.

The control interface calls them.
"""

import asyncio
import contextlib
import itertools
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from port_agent.control.agent_metrics import agent_families
from port_agent.control.http import SocketPeer
from port_agent.control.http_answers import AgentStatus, JobDetail, JobSummary, Row, SettingsInForce
from port_agent.control.requests import JobChange
from port_agent.energy.metrics import meter_families
from port_agent.health.conditions import HealthItem
from port_agent.jobs.job import (
    AwayPhase,
    Job,
    JobKind,
    JobNotFoundError,
    JobRequestError,
    JobSpec,
    JobState,
    Migratable,
    check_spec,
    order,
)
from port_agent.policy.config import describe_config, restart_needed
from port_agent.supervisor.context import DaemonContext
from port_agent.supervisor.dispatch import run_conditions
from port_agent.supervisor.job.attachments import user_id, user_name
from port_agent.supervisor.job.log import read_log, read_more
from port_agent.supervisor.job.promise import check_known, left_s, promise, promised_plan
from port_agent.supervisor.job.worker_kinds import BundleFacts
from port_agent.supervisor.peers.peers import Peers
from port_agent.supervisor.run_now import RunNow
from port_agent.supervisor.status import agent_status, job_summary, set_aside_summary
from port_agent.supervisor.timeline import TimelineEntry
from port_agent.system.atomic_file import sync_directory
from port_agent.system.checksum import file_checksum
from port_agent.system.directory_handle import DirectoryHandle
from port_agent.system.helper_process import HelperError, ask_helper
from port_agent.system.prometheus import exposition
from port_agent.worker.attach import AttachRequest
from port_planner.base.errors import PortError
from port_planner.base.units import format_seconds, shown

if TYPE_CHECKING:
    from port_agent.health.doctor import Check

Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

BUNDLE_NAME = "bundle.port"
MAX_UPLOADS = 16
"""Largest number of uploads on disk that no job has taken yet; each stays for at most an hour."""
_FLUSH_PATIENCE_S = 5.0
"""Seconds that a report waits for the newest figures to be on disk."""
_FOLLOW_POLL_S = 0.5
_HISTORY_SHOWN = 50
_DAY_S = 86400.0
_OVER_SHOWN = 10
_ENDS_WITH_JOB = ("job-does-not-fit", "device-absent", "job-failing", "deadline-missed")
"""Conditions of a job that no longer matter once it has ended."""


def _check_here(job: Job) -> None:
    """Raise `JobRequestError` for a job that is on another device."""
    if job.state is JobState.AWAY and job.away is not None:
        raise JobRequestError(
            f"job {job.label} is on {job.away.name}; take it back with port-agent job recall {job.id}", job.id
        )


def _result_file(job: Job) -> Path | None:
    """Return the file with the trained weights of a job; None if there is none yet."""
    return Path(job.result) if job.result is not None and Path(job.result).is_file() else None


async def _result_is_damaged(job: Job) -> bool:
    """Return whether the file of a job's result exists and differs from what its worker wrote; raises OSError."""
    file = _result_file(job)
    if file is None or job.result_checksum is None:
        return False
    return await asyncio.to_thread(file_checksum, file) != job.result_checksum


def _check_reachable(bundle: Path) -> None:
    """Raise PortError if a fine-tuning would run with this agent's permissions and these are insufficient."""
    from port_agent.finetuning.job_file import FinetuneJob

    if os.geteuid() != 0:  # as root it takes the submitter's permissions, and uses none of its own
        FinetuneJob.read(bundle).check_reachable(f"this agent's user {user_name(os.geteuid())}")


class MeterUnavailableError(PortError):
    """Energy is not metered here."""

    def __init__(self) -> None:
        super().__init__("the energy meter could not be opened; see `port-agent status`")


class Service:
    """The requests of the control interface. Every change wakes the loop, which then acts on it.
    Jobs are named by id or name.

    Methods that name a job raise `JobNotFoundError` if it does not exist. Methods that change something return once the
    change is on disk, or raise `StoreError` if the disk rejects it; the change still holds.
    """

    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self._submissions: dict[str, asyncio.Task[JobDetail]] = {}
        """Submissions that are being answered, by their ids."""

    # --- looking

    def status(self) -> AgentStatus:
        """Return everything that one screen shows."""
        return agent_status(self._context)

    def peers(self) -> Row:
        """Return the other agents, and what they see of this one."""
        return self._context.peers.describe()

    @property
    def other_devices(self) -> Peers:
        """Pairing with other devices."""
        return self._context.peers

    def peer_rows(self) -> list[dict[str, object]] | None:
        """Return the other agents; None while discovery is off."""
        return self._context.peers.rows()

    async def why(self, since: float | None) -> list[TimelineEntry]:
        """Return the decisions since a time (Unix time), by default in the last day; raises OSError."""
        begin = self._context.clock.wall_s() - _DAY_S if since is None else since
        return await asyncio.to_thread(self._context.timeline.since, begin)

    def health(self) -> tuple[HealthItem, ...]:
        """Return current problems, the worst first."""
        return tuple(self._context.health.items(self._context.clock.monotonic_s()))

    def metrics(self) -> str:
        """Return all metrics in Prometheus' text format."""
        families = [*agent_families(self.status(), self._context.store.all())]
        if self._context.meter is not None:
            families += meter_families(self._context.meter)
        return exposition(families)

    def jobs(self, *, with_all_over: bool) -> tuple[JobSummary, ...]:
        """Return the active jobs and the most recently ended ones, or all ended ones."""
        jobs = self._context.store.all()
        if not with_all_over:
            over = [job for job in jobs if job.state.is_over][-_OVER_SHOWN:]
            jobs = [job for job in jobs if not job.state.is_over or job in over]
        aside = (set_aside_summary(job) for job in self._context.store.set_aside.values())
        return (*(job_summary(self._context, job) for job in jobs), *aside)

    async def job(self, name: str) -> JobDetail:
        """Return everything about a job."""
        return await self._detail(self._context.store.find(name))

    def log(self, name: str, lines: int) -> str:
        """Return the last lines of a job's log."""
        return read_log(self._directory(name), lines)[0]

    def follow_log(self, name: str, lines: int) -> AsyncIterator[str]:
        """Return the last lines of a job's log, and then what is added until the job ends."""
        return self._follow(self._context.store.find(name), lines)

    async def result(self, name: str) -> Path:
        """Return the file with the trained weights.

        Raises `JobRequestError` if there is none yet, or if it differs from what the worker wrote; raises OSError.
        """
        job = self._context.store.find(name)
        file = _result_file(job)
        if file is None and job.spec.kind is JobKind.FINETUNE and job.result is not None:
            raise JobRequestError(f"the result of job {job.label} is the directory {job.result}", job.id)
        if file is None:
            raise JobRequestError(f"job {job.label} has no result yet ({job.state.name.lower()})", job.id)
        if await _result_is_damaged(job):
            what = f"damaged: its checksum differs; `port-agent job resume {job.id}` writes it again"
            if job.spec.waits_for_data:
                what = "damaged, or from a round that was interrupted at its end; the next round writes it again"
            raise JobRequestError(f"the result of job {job.label} is {what}", job.id)
        return file

    async def energy_report(self, query: Mapping[str, str]) -> Row:
        """Return the energy report that a query asks for; raises `MeterUnavailableError`."""
        from port_agent.energy.ledger import FILE_NAME  # a report is rarely requested: not worth resident memory
        from port_agent.energy.report import report_from_query

        if self._context.meter is None:
            raise MeterUnavailableError()
        written = self._context.meter.flush(self._context.clock.monotonic_s())
        with contextlib.suppress(PortError, TimeoutError):  # a disk that refuses is a health item
            async with asyncio.timeout(_FLUSH_PATIENCE_S):
                await asyncio.shield(asyncio.wrap_future(written))
        return await asyncio.to_thread(report_from_query, self._context.settings.state_dir / FILE_NAME, query)

    async def examine(self, *, flash_test: bool) -> "list[Check]":
        """Return the findings of `doctor`; takes a few seconds."""
        from port_agent.health.doctor import examine  # rarely needed: not worth resident memory

        context = self._context
        return await asyncio.to_thread(examine, context.settings.state_dir, context.config, flash_test=flash_test)

    # --- jobs

    def check_submission(self, spec: JobSpec) -> None:
        """Raise `JobRequestError` for what `submit` would reject regardless of the bundle, which is not sent yet."""
        self._context.store.check_new(self._led(spec))

    async def submitted(self, submission: str) -> JobDetail | None:
        """Return the job that the request with this id created, once it exists; None if there was no such request."""
        going = self._submissions.get(submission)
        if going is not None:
            return await asyncio.shield(going)
        jobs = self._context.store.all()
        job = next((job for job in jobs if submission and job.spec.submission == submission), None)
        return None if job is None else await self._detail(job)

    async def submit(self, spec: JobSpec, upload: Path | None, peer: SocketPeer | None = None) -> JobDetail:
        """Return the new job as `_submit` does, even if the client disconnects meanwhile and asks again."""
        going = asyncio.create_task(self._submit(spec, upload, peer))
        if spec.submission:
            self._submissions[spec.submission] = going
            going.add_done_callback(lambda _: self._submissions.pop(spec.submission))
        return await asyncio.shield(going)

    async def _submit(self, spec: JobSpec, upload: Path | None, peer: SocketPeer | None) -> JobDetail:
        """Return the new job, which is durable. `upload`: the uploaded bundle, which becomes the job's own.

        `peer`: who asks for it; a fine-tuning runs with that user's rights where this agent has root's.

        Without a deadline it has the one that its bundle was planned for, if that is still ahead.
        Raises `JobRequestError` for a job that cannot be run, `PortError` for a bundle that is broken.
        """
        context = self._context
        if spec.kind is JobKind.FINETUNE:
            if peer is None:
                raise JobRequestError(
                    "a fine-tuning must be submitted over the control socket, which identifies its user"
                )
            spec = replace(spec, owner=user_name(peer.uid))
        spec = self._led(spec)
        facts = await asyncio.to_thread(self._read_bundle, spec, upload)
        await self._check_bundle(spec, upload)
        if spec.deadline_at is None and (facts.deadline_at or 0.0) > context.clock.wall_s():
            spec = check_spec(replace(spec, deadline_at=facts.deadline_at))

        def prepare(directory: Path) -> None:
            if upload is not None:
                upload.rename(directory / BUNDLE_NAME)
                sync_directory(directory)
            if spec.waits_for_data:
                context.inboxes.create(spec.name)

        job = await asyncio.to_thread(context.store.add, spec, context.clock.wall_s(), prepare)
        job = self._promised(context.store.get(job.id), facts)
        self._note(job, "submitted", f"priority {spec.priority}")
        if spec.deadline_at is not None:
            context.timers.set_deadline(job.id, spec.deadline_at)
        context.wake.set()
        return await self._detail(job)

    def _led(self, spec: JobSpec) -> JobSpec:
        """Return a job whose leader is given by its id; raises JobRequestError for a device that is not paired."""
        if not spec.terms.leader:
            return spec
        leader = self._context.peers.fleet.device_called(spec.terms.leader)
        if leader is None:
            raise JobRequestError(
                f"{shown(spec.terms.leader)} names no paired device, or several; give its id, as shown by `port-agent "
                "peer list`"
            )
        return replace(spec, terms=replace(spec.terms, leader=leader.id, leader_name=leader.name))

    async def attach(self, request: AttachRequest, peer: SocketPeer) -> tuple[Job, Conversation]:
        """Return the job of a program that asks to be attached, and the protocol for the rest of its connection.

        Raises `JobRequestError` for an invalid name.
        """
        attachments = self._context.runners.host.attachments
        job = await attachments.attach(request, peer)

        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await attachments.converse(job, request, peer, reader, writer)

        return job, converse

    def owner(self, name: str) -> int | None:
        """Return the user id of the owner of a program or fine-tuning, or None for a job without an owner."""
        try:
            job = self._context.store.find(name)
        except JobRequestError:  # none, or set aside: the request itself reports it
            return None
        if job.spec.kind is JobKind.FINETUNE and job.spec.owner is not None:
            return user_id(job.spec.owner)
        program = self._context.runners.host.attachments.get(job.id)
        return None if program is None else program.uid

    def uploads(self) -> DirectoryHandle:
        """Return the directory for arriving bundles.

        Raises `JobRequestError` while too many wait for their job, and OSError.
        """
        self._uploads.mkdir(exist_ok=True)
        directory = DirectoryHandle.open(self._uploads)
        waiting = sum(1 for _ in directory.files())
        if waiting >= MAX_UPLOADS:
            directory.close()
            raise JobRequestError(
                f"{waiting} uploads wait for their job; submit the jobs, or wait until the uploads are deleted"
            )
        return directory

    def upload(self, token: str) -> Path | None:
        """Return the bundle that arrived under this name in `uploads`; None if there is none."""
        path = self._uploads / token
        return path if path.is_file() else None

    def inbox(self, name: str) -> DirectoryHandle:
        """Return the directory from which a job takes its data.

        Raises `JobRequestError` if it does not use one, and OSError.
        """
        job = self._context.store.find(name)
        if not job.spec.waits_for_data:
            raise JobRequestError(f"job {job.label} takes no data from an inbox; submit it with --inbox", job.id)
        self._context.inboxes.create(job.spec.name)
        return self._context.inboxes.open(job.spec.name)

    @property
    def kept_free_bytes(self) -> int:
        """Bytes of disk space that arriving data may not use."""
        return self._context.config.policy.min_free_disk_bytes

    async def pause_job(self, name: str) -> JobSummary:
        """Pause a job until `resume_job`; its worker releases its memory. Raises `JobRequestError`."""
        job = self._context.store.find(name)
        if job.state.is_over:
            raise JobRequestError(
                f"job {job.label} has ended ({job.state.name.lower()}); there is nothing to pause", job.id
            )
        _check_here(job)
        return await self._change(replace(job, state=JobState.PAUSED, reason="paused by you"), "paused")

    async def resume_job(self, name: str) -> JobSummary:
        """Resume a paused, waiting or failed job, or let a job write its damaged result again;
        raises `JobRequestError`.
        """
        job = self._context.store.find(name)
        if job.spec.kind is JobKind.ATTACHED and job.state.is_over:
            raise JobRequestError(
                f"job {job.label} was a program of {job.spec.owner}; start that program again", job.id
            )
        _check_here(job)
        rewrites = job.state is JobState.FINISHED and await _result_is_damaged(job)
        if job.state in (JobState.FINISHED, JobState.CANCELLED) and not rewrites:
            raise JobRequestError(f"job {job.label} is {job.state.name.lower()}; submit it again", job.id)
        self._context.without_board.pop(job.id, None)
        if job.state in (JobState.QUEUED, JobState.RUNNING, JobState.WAITING_DATA):
            self._context.wake.set()
            await self._settle()
            return job_summary(self._context, job)
        if job.state is JobState.FAILED:
            self._context.inboxes.drop_round(self._context.store.job_dir(job.id), job.rounds + 1)
        in_round = (self._context.store.job_dir(job.id) / "rounds" / str(job.rounds + 1)).is_dir()
        waits = job.spec.waits_for_data and not in_round
        state = JobState.WAITING_DATA if waits else JobState.QUEUED
        self._context.health.clear("job-given-up", str(job.id))
        return await self._change(replace(job, state=state, reason="", failures=0, finished_at=None), "resumed")

    async def run_now(self, name: str, for_s: float | None) -> JobSummary:
        """Run a job before all others, even while the device is in use or outside of the time windows;
        ends a pause of everything.

        `for_s`: seconds; None: until the job ends. Raises `JobRequestError`.
        """
        await self.resume_job(name)
        context, job = self._context, self._context.store.find(name)
        context.run_now = RunNow(job.id, context.clock.uptime_s() + (math.inf if for_s is None else for_s))
        span = "until it ends" if for_s is None else f"for {format_seconds(for_s)}"
        context.timeline.note(context.clock.wall_s(), f"you want job {job.label} to run now, {span}")
        await self.resume_all()
        return await self._change(context.store.get(job.id), f"to run now, {span}")

    async def cancel_job(self, name: str) -> JobSummary:
        """End a job for good; its files stay until the history is trimmed. Raises `JobRequestError`.

        A job that could not be restored is removed with its files.
        """
        aside = next((one for one in self._context.store.set_aside.values() if name == str(one.id)), None)
        if aside is not None:
            self._context.store.forget(aside.id)
            self._context.health.clear("job-set-aside", str(aside.id))
            await self._settle()
            return set_aside_summary(aside)
        job = self._context.store.find(name)
        if job.state.is_over:
            raise JobRequestError(f"job {job.label} has already ended ({job.state.name.lower()})", job.id)
        self._context.timers.set_deadline(job.id, None)
        self._context.inboxes.forget(job.spec.name)
        for code in _ENDS_WITH_JOB:
            self._context.health.clear(code, str(job.id))
        now = self._context.clock.wall_s()
        over = replace(job, state=JobState.CANCELLED, reason="cancelled by you", finished_at=now)
        return await self._change(over, "cancelled")

    async def recall_job(self, name: str, *, force: bool) -> JobSummary:
        """Take a job back from the device that it moved to, with its checkpoint.

        `force`: at once and without that device's reply, from the checkpoint that is here; what that device trains is
        discarded. Raises `JobRequestError`.
        """
        job = self._context.store.find(name)
        if job.state is not JobState.AWAY or job.away is None:
            raise JobRequestError(f"job {job.label} is on this device ({job.state.name.lower()})", job.id)
        if force:
            away = replace(job.away, phase=AwayPhase.CLOSING)
            return await self._change(
                replace(
                    job, state=JobState.QUEUED, reason="", away=away, spec=replace(job.spec, movable=Migratable.NEVER)
                ),
                f"recalled by force from {job.away.name}",
            )
        recalled = replace(job, away=replace(job.away, recalled=True), reason=f"recalled from {job.away.name}")
        return await self._change(recalled, f"recalled from {job.away.name}")

    async def change_job(self, name: str, change: JobChange) -> JobSummary:
        """Change the priority or the deadline of a job."""
        job = self._context.store.find(name)
        job = replace(job, spec=check_spec(change.apply(job.spec)))
        if change.moves_deadline:
            self._context.timers.set_deadline(job.id, job.spec.deadline_at)
            self._context.health.clear("deadline-missed", str(job.id))
        return await self._change(job, str(change))

    # --- the whole agent

    async def pause_all(self, for_s: float | None) -> float | None:
        """Train nothing for a time, or until `resume_all`; return the end in Unix time, None for no end."""
        self._context.run_now = None
        self._context.pause.begin(for_s)
        self._context.wake.set()
        await asyncio.to_thread(self._context.pause.flush)
        until = self._context.pause.until()
        return None if until is None or math.isinf(until) else until

    async def resume_all(self) -> None:
        """End the pause of everything."""
        self._context.pause.end()
        self._context.wake.set()
        await asyncio.to_thread(self._context.pause.flush)

    def reload(self) -> SettingsInForce:
        """Apply the configuration files; raises `ConfigError` while the old settings stay in force."""
        self._context.reload()
        waiting = restart_needed(self._context.started_with, self._context.config)
        return SettingsInForce(describe_config(self._context.config), tuple(waiting))

    # --- inside

    @property
    def _uploads(self) -> Path:
        return self._context.settings.state_dir / "uploads"

    def _promised(self, job: Job, facts: BundleFacts) -> Job:
        """Return the job with its promise, if the bundle contains enough figures and a plan fits."""
        context, wall_s = self._context, self._context.clock.wall_s()
        conditions = run_conditions(context, context.config.policy.not_in_use)
        plan = promised_plan(job.spec, facts, conditions, wall_s)
        if plan is None:
            context.runners.host.fits(job, conditions)  # where none does, that becomes a health item
            return job
        line = order([other for other in context.store.all() if not other.state.is_over])
        before_s = sum(left_s(other) for other in itertools.takewhile(lambda other: other.id != job.id, line))
        job = replace(job, promise=promise(job.spec, facts, plan, conditions, context.usual_times, wall_s, before_s))
        context.store.save(job)
        return job

    def _read_bundle(self, spec: JobSpec, upload: Path | None) -> BundleFacts:
        path = upload if upload is not None else spec.bundle and Path(spec.bundle)
        if not path:
            return BundleFacts()
        try:
            facts = self._context.seams.kinds[spec.kind].read_bundle(path)
            check_known(spec, facts)
            if spec.kind is JobKind.FINETUNE:
                _check_reachable(Path(path))
            return facts
        except PortError:
            if upload is not None:
                upload.unlink(missing_ok=True)
            raise
        except OSError as error:
            raise JobRequestError(f"the agent cannot read the bundle {path}: {error.strerror}") from error

    async def _check_bundle(self, spec: JobSpec, upload: Path | None) -> None:
        """Raise JobRequestError if any part of an uploaded bundle is damaged.

        The message names the job, because nobody knows the upload's name.
        """
        check = self._context.seams.kinds[spec.kind].check
        if check is None or upload is None:
            return
        command = check(upload)
        try:
            await ask_helper(command)
        except HelperError as error:
            await asyncio.to_thread(upload.unlink, missing_ok=True)
            raise JobRequestError(
                error.last_line.replace(command.arguments[0], f"the bundle of {spec.name}")
            ) from error

    def _directory(self, name: str) -> Path:
        return self._context.store.job_dir(self._context.store.find(name).id)

    async def _detail(self, job: Job) -> JobDetail:
        store = self._context.store
        history = await asyncio.to_thread(store.history, job.id, _HISTORY_SHOWN)
        inbox = self._context.inboxes.root / job.spec.name if job.spec.waits_for_data else None
        return JobDetail(
            job,
            job_summary(self._context, job),
            tuple(history),
            store.job_dir(job.id),
            inbox,
            *self._metered(job),
        )

    def _metered(self, job: Job) -> tuple[float | None, float | None]:
        """Return what the job used since the agent started: per step on average, idle power
        included, and in total without it.
        """
        used = None if self._context.meter is None else self._context.meter.job_energy().get(str(job.id))
        if used is None or not used.steps:
            return None, None
        return used.gross_joules / used.steps, used.net_joules

    async def _follow(self, job: Job, lines: int) -> AsyncIterator[str]:
        directory = self._context.store.job_dir(job.id)
        text, position = read_log(directory, lines)
        yield text
        while True:
            try:
                ended = self._context.store.get(job.id).state.is_over
            except JobNotFoundError:
                return  # over, and tidied away between two looks
            text, position = read_more(directory, position)
            if text:
                yield text
            elif ended:
                return
            await asyncio.sleep(_FOLLOW_POLL_S)

    async def _change(self, job: Job, what: str) -> JobSummary:
        self._context.store.save(job)
        self._note(job, "request", what)
        self._context.wake.set()
        await self._settle()
        return job_summary(self._context, job)

    def _note(self, job: Job, kind: str, text: str) -> None:
        self._context.store.note(self._context.clock.wall_s(), job.id, kind, text)

    async def _settle(self) -> None:
        """Wait until the requested change is on disk.

        Raises `StoreError` if the disk rejects it; the change still holds.
        """
        if not await asyncio.to_thread(self._context.store.flush) and self._context.store.trouble is not None:
            raise self._context.store.trouble
