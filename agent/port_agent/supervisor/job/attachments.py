"""Programs of users that attached themselves (`port-agent exec --opportunistic`).

The supervisor controls them like workers, but their users start them.

A program stays attached while it waits. For the Runner it is a worker that already exists: its run begins with
`resume`, and ends when it has released its memory. When its connection closes, only its number is kept.
"""

import asyncio
import contextlib
import os
import pwd
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from port_agent.control.http import SocketPeer
from port_agent.jobs.job import Job, JobKind, JobRequestError, JobSpec, JobState
from port_agent.jobs.store import JobStore
from port_agent.supervisor.job.exit_status import WorkerExit
from port_agent.supervisor.job.plan_choice import PlanFigures
from port_agent.supervisor.job.worker_process import LEAVE_PATIENCE_S, RequestedState, WorkerPhase
from port_agent.system.cgroup import WorkerGroup
from port_agent.system.clock import Clock
from port_agent.worker.attach import AttachRequest
from port_agent.worker.protocol import (
    Command,
    Event,
    LeaveNow,
    LineSplitter,
    MemoryReleased,
    PauseTraining,
    ProtocolError,
    ReleaseMemory,
    ResumeTraining,
    StepDone,
    TrainingFailed,
    TrainingFinished,
    WorkerPaused,
    WorkerResumed,
    decode_event,
    encode_message,
)
from port_planner.base.errors import ExitCode

ANSWER_PATIENCE_S = 60.0
"""Seconds to wait for an answer.

A program that its user stopped (Ctrl-Z) never answers; after this time others may run. Until then it may be writing its
memory: 600 MiB take 25 s on an SD card.
"""

MAX_ATTACHED = 16
"""Largest number of attached programs.

Each keeps a connection of the control socket, which must have some left for commands.
"""

_OWN_REPORTS = (StepDone, WorkerPaused, WorkerResumed, MemoryReleased, TrainingFinished, TrainingFailed)
"""Events that an attached program does not send, because it has no plans, checkpoints or devices."""

_WENT_AWAY = "it ended without a report: it was killed, or its native code crashed"


class AttachedProgram:
    """One attached program."""

    group: WorkerGroup | None = None
    """Memory group of the program: None, because it stays in its user's group."""

    def __init__(self, job_id: int, uid: int, pid: int, ram_bytes: int, writer: asyncio.StreamWriter) -> None:
        self.job_id, self.uid, self.pid = job_id, uid, pid
        self.plans: tuple[PlanFigures, ...] = (PlanFigures(0, ram_bytes),)
        self.phase, self.requested = WorkerPhase.ENDED, RequestedState.LEAVE
        self.silent = False
        """Whether the program was asked to release its memory and does not answer."""
        self._writer = writer
        self._on_event: Callable[[Event], None] = lambda event: None
        self._on_exit: Callable[[WorkerExit], None] | None = None
        self._on_disobedience: Callable[[str, float], None] = lambda command, limit_s: None
        self._finished = self._cancelled = False
        self._failure: TrainingFailed | None = None
        self._patience: list[asyncio.TimerHandle] = []
        self._cpu_percent = 100.0
        self._cpu_before_s = process_cpu_s(pid)
        self._cpu_s = 0.0

    def begin(
        self,
        cpu_percent: float,
        on_event: Callable[[Event], None],
        on_exit: Callable[[WorkerExit], None],
        on_disobedience: Callable[[str, float], None],
    ) -> None:
        """Let it run on a share of all CPUs.

        Its events and the end of this run are passed to the callbacks, as for a worker process.
        """
        self._on_event, self._on_exit, self._on_disobedience = on_event, on_exit, on_disobedience
        self.phase, self.requested = WorkerPhase.STARTING, RequestedState.TRAIN
        self._cpu_percent = cpu_percent
        self._send(ResumeTraining(cpu_percent=cpu_percent))

    # --- orders

    def pause(self) -> None:
        """Ask it to stop between two operators; it keeps its memory."""
        if self.requested is RequestedState.TRAIN:
            self.requested = RequestedState.PAUSE
            self._send(PauseTraining())

    def resume(self) -> None:
        """Continue after a pause."""
        if self.requested is RequestedState.PAUSE:
            self.requested = RequestedState.TRAIN
            self._send(ResumeTraining(cpu_percent=self._cpu_percent))

    def limit_cpu(self, cpu_percent: float) -> None:
        """Limit its share of all CPUs."""
        if cpu_percent != self._cpu_percent:
            self._cpu_percent = cpu_percent
            if self.requested is RequestedState.TRAIN:
                self._send(ResumeTraining(cpu_percent=cpu_percent))

    def leave(self, reason: str) -> None:
        """Ask it to release its memory and to wait; its user sees `reason`."""
        if self.requested is not RequestedState.LEAVE:
            self._await_release()
            self._send(ReleaseMemory(reason=reason))

    def cancel(self) -> None:
        """Send it the signal of Ctrl-C, whether it runs or waits."""
        if not self._cancelled:
            self._cancelled = True
            self._await_release()
            self._send(LeaveNow())

    def kill(self) -> None:
        """End its run because the supervisor ends; the program stops by itself when its connection closes."""
        self._end(WorkerExit(ExitCode.LEFT))

    def checkpoint(self) -> None:
        """Do nothing: its state is in its process and its page file."""

    def switch_plan(self, index: int, reason: str) -> None:
        """Do nothing: its user chose its budget."""

    def widen_limit(self, data_limit_bytes: int) -> None:
        """Do nothing: its user sets its limits."""

    def tighten_limit(self, resident_bytes: int | None) -> None:
        """Do nothing: its user sets its limits."""

    # --- events of the worker

    def receive(self, event: Event) -> None:
        """Handle one of its events."""
        if not isinstance(event, _OWN_REPORTS):
            return
        self.silent = False
        match event:
            case WorkerResumed() | StepDone() if self.requested is RequestedState.TRAIN:
                self.phase = WorkerPhase.TRAINING
            case WorkerPaused() if self.requested is RequestedState.PAUSE:
                self.phase = WorkerPhase.PAUSED
            case TrainingFinished():
                self._finished = True
            case TrainingFailed():
                self._failure = event
        self._on_event(event)
        if isinstance(event, MemoryReleased) and self.requested is RequestedState.LEAVE:
            self._end(WorkerExit(ExitCode.LEFT, cancelled=self._cancelled))

    def gone(self) -> WorkerExit:
        """Record that its connection has closed, and return how it ended."""
        returncode = ExitCode.DONE if self._finished else ExitCode.FAILED
        failure = self._failure
        if failure is None and not self._finished:
            failure = TrainingFailed(code="gone", message=_WENT_AWAY)
        end = WorkerExit(returncode, self._finished, self._cancelled, failure=failure)
        self._end(end)
        return end

    def close(self) -> None:
        """Close its connection, because the agent stops."""
        self._disarm()
        self._writer.close()

    def cpu_s(self) -> float:
        """Return CPU seconds since it attached; for a process that ended, the last known value."""
        self._cpu_s = max(self._cpu_s, process_cpu_s(self.pid) - self._cpu_before_s)
        return self._cpu_s

    # --- inside

    def _send(self, command: Command) -> None:
        self._writer.write(encode_message(command))

    def _await_release(self) -> None:
        self.requested = RequestedState.LEAVE
        self._disarm()
        loop = asyncio.get_running_loop()
        self._patience = [
            loop.call_later(LEAVE_PATIENCE_S, self._late),
            loop.call_later(ANSWER_PATIENCE_S, self._give_up),
        ]

    def _late(self) -> None:
        if not self._cancelled:  # its own clean-up takes as long as it takes
            self._on_disobedience("release", LEAVE_PATIENCE_S)

    def _give_up(self) -> None:
        self.silent = True
        self._end(WorkerExit(ExitCode.LEFT, cancelled=self._cancelled))

    def _disarm(self) -> None:
        for timer in self._patience:
            timer.cancel()
        self._patience = []

    def _end(self, end: WorkerExit) -> None:
        self._disarm()
        self.phase, self.requested = WorkerPhase.ENDED, RequestedState.LEAVE
        on_exit, self._on_exit = self._on_exit, None
        self._on_event = lambda event: None
        if on_exit is not None:
            on_exit(end)


class Attachments:
    """All attached programs, by the numbers of their jobs."""

    def __init__(self, store: JobStore, clock: Clock, on_change: Callable[[], None]) -> None:
        self._store, self._clock, self._on_change = store, clock, on_change
        self._programs: dict[int, AttachedProgram] = {}
        self._ended_cpu_s = 0.0

    def get(self, job_id: int) -> AttachedProgram | None:
        """Return the program of a job while its connection is open."""
        return self._programs.get(job_id)

    def answers(self, job_id: int) -> bool:
        """Return whether a job's program exists and answers commands."""
        program = self.get(job_id)
        return program is not None and not program.silent

    def cpu_s(self) -> float:
        """Return the CPU seconds of all programs, living and ended, while they were attached."""
        return self._ended_cpu_s + sum(program.cpu_s() for program in self._programs.values())

    async def attach(self, request: AttachRequest, peer: SocketPeer) -> Job:
        """Return the job of a program that asks to be attached; raises JobRequestError, StoreError."""
        if len(self._programs) >= MAX_ATTACHED:
            raise JobRequestError(f"{MAX_ATTACHED} programs are attached, as many as this agent takes; end one")
        names = {job.spec.name for job in self._store.all() if not job.state.is_over}
        name = request.name if request.name not in names else f"{request.name}-{request.pid}"
        spec = JobSpec(name=name, bundle=None, kind=JobKind.ATTACHED, owner=user_name(peer.uid))
        job = await asyncio.to_thread(self._store.add_attached, spec, self._clock.wall_s(), request.job)
        job = replace(job, step=request.step, failed_at_step=request.step)
        self._store.keep_in_memory(job)
        return job

    async def converse(
        self,
        job: Job,
        request: AttachRequest,
        peer: SocketPeer,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Exchange messages with a program until its connection closes; only then is it forgotten."""
        program = AttachedProgram(job.id, peer.uid, peer.pid or request.pid, request.ram_bytes, writer)
        self._programs[job.id] = program
        self._on_change()
        lines = LineSplitter()
        try:
            while data := await reader.read(1 << 16):
                for line in lines.feed(data):
                    with contextlib.suppress(ProtocolError):  # a message of a later version
                        program.receive(decode_event(line))
        except (ConnectionError, ProtocolError):
            pass  # it has ended, or does not speak the protocol
        finally:
            self._forget(program)

    def report_cancelled(self) -> None:
        """End programs whose jobs were cancelled while they waited."""
        for program in self._programs.values():
            job = self._job(program)
            if job is not None and job.state is JobState.CANCELLED:
                program.cancel()

    def close(self) -> None:
        """Close every connection: programs wait until an agent is running again."""
        for program in self._programs.values():
            program.close()

    def _job(self, program: AttachedProgram) -> Job | None:
        """Return its job; None if the job ended long ago and is no longer in the history."""
        try:
            return self._store.get(program.job_id)
        except JobRequestError:
            return None

    def _forget(self, program: AttachedProgram) -> None:
        self._ended_cpu_s += program.cpu_s()
        self._programs.pop(program.job_id, None)
        end = program.gone()
        job = self._job(program)
        if job is not None and not job.state.is_over:  # it waited; what ran was settled with its run
            reason = end.failure.message if end.failure is not None else "finished"
            state = JobState.FAILED if end.failure is not None else JobState.FINISHED
            self._store.keep_in_memory(replace(job, state=state, reason=reason, finished_at=self._clock.wall_s()))
        self._on_change()


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process of any user, 0 if it does not exist or is hidden."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if the user has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def user_id(name: str) -> int | None:
    """Return the number of a user by `user_name`; None if the user no longer exists."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return int(name) if name.isdecimal() else None
