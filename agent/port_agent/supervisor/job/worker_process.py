"""One worker process.

It starts with its limits, receives commands over a socket pair, and must obey within deadlines.

To pause, the worker is asked first; if it does not answer within `PAUSE_PATIENCE_S`, a signal stops it, so that no
training instruction starts more than 100 ms after the request. To leave, it is also asked first, and killed
`LEAVE_PATIENCE_S` after the time for its last commit.
"""

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from port_agent.supervisor.job.exit_status import WorkerExit
from port_agent.system.cgroup import MemoryEvents, WorkerGroup, system_oom_kills
from port_agent.system.locks import LockFile
from port_agent.system.memory_limit import hold_resident, limit_data_of
from port_agent.system.python_process import NEUTRAL_DIRECTORY, module_command, module_environment
from port_agent.worker.protocol import (
    Command,
    Event,
    LeaveNow,
    LineSplitter,
    PauseTraining,
    ProtocolError,
    ResumeTraining,
    StepDone,
    SwitchPlan,
    TrainingFailed,
    TrainingFinished,
    WorkerPaused,
    WorkerReady,
    WorkerResumed,
    WriteCheckpoint,
    decode_event,
    encode_message,
)
from port_agent.worker.worker_options import CONTROL_FD_PLACE

PAUSE_PATIENCE_S = 0.07
LEAVE_PATIENCE_S = 0.93
"""Seconds until a leaving worker is killed.

Killing and cleaning up takes up to 50 ms more, so the memory is free within the second.
"""
_EXIT_POLL_S = 0.1
"""Seconds between checks whether the worker has ended, if the kernel has no pidfd (macOS)."""


class WorkerPhase(Enum):
    """The worker's activity, as far as it has reported."""

    STARTING = "starting"
    TRAINING = "training"
    PAUSED = "paused"
    ENDED = "ended"


class RequestedState(Enum):
    """The supervisor's last request."""

    TRAIN = "train"
    PAUSE = "pause"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything with which a worker process is started."""

    command: tuple[str, ...]
    """Command of the worker; `{control_fd}` in an argument stands for the control descriptor."""
    group: WorkerGroup | None = None
    data_limit_bytes: int | None = None
    environment: Mapping[str, str] | None = None


class WorkerProcess:
    """A running worker. `on_event`, `on_output` and `on_exit` are called from the event loop."""

    def __init__(
        self,
        launch: Launch,
        on_event: Callable[[Event], None],
        on_output: Callable[[bytes], None],
        on_exit: Callable[[WorkerExit], None],
        on_disobedience: Callable[[str, float], None],
    ) -> None:
        self.phase = WorkerPhase.STARTING
        self.requested = RequestedState.TRAIN
        self.group = launch.group
        self.pid = 0
        self._launch = launch
        self._on_event, self._on_output, self._on_exit = on_event, on_output, on_exit
        self._on_disobedience = on_disobedience
        self._loop = asyncio.get_running_loop()
        self._lines = LineSplitter()
        self._stopped_by_signal = False
        self._cancelled = False
        self._leaves_within_s = math.inf
        self._killed_after_s: float | None = None
        self._finished = False
        self._failure: TrainingFailed | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._pidfd: int | None = None
        self._events_before = launch.group.memory_events() if launch.group else MemoryEvents()
        self._system_kills_before = system_oom_kills()

    def start(self, lock: LockFile) -> None:
        """Start the process, which from then on holds `lock`; raises OSError if that fails."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    self._command(theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=NEUTRAL_DIRECTORY,
                    env=self._environment(),
                    pass_fds=(theirs.fileno(), lock.descriptor),
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        self.pid = self._process.pid
        self._socket = ours
        ours.setblocking(False)
        self._loop.add_reader(ours, self._read_events)
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)
            self._loop.add_reader(self._process.stdout, self._read_output)
        self._watch_exit()

    # --- orders

    def pause(self) -> None:
        """Ask it to stop between two instructions and keep its memory."""
        if self.requested is not RequestedState.TRAIN or self.phase is WorkerPhase.ENDED:
            return
        self.requested = RequestedState.PAUSE
        self.send(PauseTraining())
        self._arm(PAUSE_PATIENCE_S, self._stop_by_signal)

    def resume(self) -> None:
        """Continue after a pause."""
        if self.requested is not RequestedState.PAUSE or self.phase is WorkerPhase.ENDED:
            return
        self.requested = RequestedState.TRAIN
        self._disarm()
        self._continue_by_signal()
        self.send(ResumeTraining())

    def leave(self, within_s: float = 0.0) -> None:
        """Ask it to end and release its memory, after a commit if that takes less than `within_s`.

        If called again, the shorter time applies; a worker that has not started has nothing to commit.
        """
        if self.phase is WorkerPhase.STARTING:
            within_s = 0.0
        if within_s >= self._leaves_within_s or self.phase is WorkerPhase.ENDED:
            return
        self.requested, self._leaves_within_s = RequestedState.LEAVE, within_s
        self._disarm()
        self._continue_by_signal()
        self.send(LeaveNow(within_s=within_s))
        self._arm(within_s + LEAVE_PATIENCE_S, self._kill)

    def cancel(self) -> None:
        """Ask it to leave for good."""
        self._cancelled = True
        self.leave()

    def switch_plan(self, index: int, reason: str) -> None:
        """Ask it to switch to another plan of the bundle after the current step."""
        self.send(SwitchPlan(plan=index, reason=reason))

    def widen_limit(self, data_limit_bytes: int) -> None:
        """Raise RLIMIT_DATA for a larger plan, before the worker switches to it."""
        before = self._launch.data_limit_bytes
        if before is None:
            return
        wide = max(before, data_limit_bytes)  # mapped memory stays counted
        with contextlib.suppress(OSError):  # it has just ended; the next one starts with its own limit
            limit_data_of(self.pid, wide)
            self._launch = replace(self._launch, data_limit_bytes=wide)

    def tighten_limit(self, resident_bytes: int | None) -> None:
        """Limit its resident memory to this, if it is known and no group limits it."""
        bounded = self.group is not None and self.group.limits_memory
        if resident_bytes is not None and not bounded and self._launch.data_limit_bytes is not None:
            with contextlib.suppress(OSError):  # it has just ended
                hold_resident(self.pid, resident_bytes)

    def checkpoint(self) -> None:
        """Ask for a checkpoint after the current step."""
        self.send(WriteCheckpoint())

    def send(self, command: Command) -> None:
        """Send one command; the end of a worker that no longer listens is about to be noticed."""
        with contextlib.suppress(OSError):
            self._socket.send(encode_message(command))  # a few dozen bytes: they fit or the worker is stuck

    def kill(self) -> None:
        """Kill it at once, because the supervisor itself must end."""
        if self.phase is not WorkerPhase.ENDED:
            self._process.kill()

    # --- inside

    def _command(self, control_fd: int) -> list[str]:
        launcher = [*module_command("port_agent.system.exec_with_limits")]
        if self._launch.group is not None:
            launcher += ["--cgroup", str(self._launch.group.path)]
        if self._launch.data_limit_bytes is not None:
            launcher += ["--data-limit", str(self._launch.data_limit_bytes)]
        arguments = (part.replace(CONTROL_FD_PLACE, str(control_fd)) for part in self._launch.command)
        return [*launcher, "--", *arguments]

    def _environment(self) -> dict[str, str]:
        return {**module_environment(), **(self._launch.environment or {})}

    def _watch_exit(self) -> None:
        if sys.platform == "linux":
            self._pidfd = os.pidfd_open(self.pid)
            self._loop.add_reader(self._pidfd, self._reap)
        else:
            self._loop.call_later(_EXIT_POLL_S, self._poll_exit)

    def _poll_exit(self) -> None:
        if self._process.poll() is None:
            self._loop.call_later(_EXIT_POLL_S, self._poll_exit)
        else:
            self._reap()

    def _read_events(self) -> None:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket)
            return
        try:
            lines = self._lines.feed(data)
        except ProtocolError:
            self._on_disobedience("an event line without an end", 0.0)
            self._process.kill()
            return
        for line in lines:
            self._take_event(line)

    def _take_event(self, line: bytes) -> None:
        try:
            event = decode_event(line)
        except ProtocolError as error:
            self._on_output(f"port-agent: ignored from the worker: {error}\n".encode())
            return
        match event:
            case WorkerPaused() if self.requested is RequestedState.PAUSE:
                self.phase = WorkerPhase.PAUSED
                self._disarm()
            case WorkerReady() | WorkerResumed() | StepDone() if self.requested is not RequestedState.PAUSE:
                self.phase = WorkerPhase.TRAINING
            case TrainingFinished():
                self._finished = True
            case TrainingFailed():
                self._failure = event
        self._on_event(event)

    def _read_output(self) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        try:
            data = os.read(stream.fileno(), 65536)
        except BlockingIOError:
            return
        if data:
            self._on_output(data)
        else:
            self._loop.remove_reader(stream)

    def _reap(self) -> None:
        returncode = self._process.poll()
        if returncode is None or self.phase is WorkerPhase.ENDED:
            return
        self._drain()
        self.phase = WorkerPhase.ENDED
        self._close()
        events = self.group.memory_events() if self.group else MemoryEvents()
        system_kills = system_oom_kills()
        before = self._system_kills_before
        end = WorkerExit(
            returncode=returncode,
            finished=self._finished,
            cancelled=self._cancelled and not (self._finished and returncode == 0),
            asked_to_leave=self.requested is RequestedState.LEAVE,
            killed_after_s=self._killed_after_s,
            failure=self._failure,
            oom_kills=events.oom_kill - self._events_before.oom_kill,
            system_oom_kills=0 if system_kills is None or before is None else system_kills - before,
        )
        self._on_exit(end)

    def _drain(self) -> None:
        """Handle what the worker reported before it ended."""
        while True:
            try:
                data = self._socket.recv(65536)
            except OSError:
                break
            if not data:
                break
            try:
                lines = self._lines.feed(data)
            except ProtocolError:
                break
            for line in lines:
                self._take_event(line)
        self._read_output()

    def _close(self) -> None:
        self._disarm()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self._process.stdout is not None:
            self._loop.remove_reader(self._process.stdout)
            self._process.stdout.close()

    def _arm(self, delay_s: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._limit = self._loop.call_later(delay_s, action)

    def _disarm(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _stop_by_signal(self) -> None:
        if (
            self.requested is RequestedState.PAUSE
            and self.phase is not WorkerPhase.ENDED
            and self._process.poll() is None
        ):
            self._process.send_signal(signal.SIGSTOP)
            self._stopped_by_signal = True
            was_training = self.phase is WorkerPhase.TRAINING
            self.phase = WorkerPhase.PAUSED
            if was_training:
                self._on_disobedience("pause", PAUSE_PATIENCE_S)

    def _continue_by_signal(self) -> None:
        if self._stopped_by_signal:
            self._process.send_signal(signal.SIGCONT)
            self._stopped_by_signal = False

    def _kill(self) -> None:
        if self.phase is WorkerPhase.ENDED:
            return
        self._killed_after_s = self._leaves_within_s + LEAVE_PATIENCE_S
        was_starting = self.phase is WorkerPhase.STARTING
        self._process.kill()
        if self.group is not None:
            self.group.kill()
        if not was_starting:
            self._on_disobedience("leave", self._killed_after_s)
