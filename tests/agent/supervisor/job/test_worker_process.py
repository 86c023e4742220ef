"""One worker process, with programs that obey, lie, babble or do nothing: patience,
signals, and how its end is told.
"""

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from port_agent.supervisor.job import worker_process
from port_agent.supervisor.job.exit_status import WorkerExit
from port_agent.supervisor.job.worker_process import Launch, RequestedState, WorkerPhase, WorkerProcess
from port_agent.system.locks import LockFile
from port_agent.system.python_process import NEUTRAL_DIRECTORY
from port_agent.worker.protocol import (
    MAX_LINE_BYTES,
    CheckpointWritten,
    Event,
    StepDone,
    TrainingFailed,
    TrainingFinished,
    WorkerReady,
)
from port_agent.worker.worker_options import CONTROL_FD_PLACE
from tests.agent.live_daemon import go, process_state

pytestmark = pytest.mark.process

HEAD = """
import signal, socket, sys
from port_agent.worker.protocol import *
line = socket.socket(fileno=int(sys.argv[1]))
def say(*events):
    line.sendall(b"".join(map(encode_message, events)))
def hear(wanted):
    for text in line.makefile("rb"):
        if isinstance(decode_command(text), wanted):
            return
READY = WorkerReady(pid=0, step=0, total_steps=9)
STEP = StepDone(step=1, epoch=0, loss=None, wall_s=1.0, cpu_s=1.0, phases_s={})
"""
DEAF = "say(READY)\nsignal.pause()"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA of another process needs Linux")


class Heard:
    """All messages of one worker process; each message wakes a waiting test."""

    def __init__(self, launch: Launch) -> None:
        self.events: list[Event] = []
        self.output = b""
        self.ends: list[WorkerExit] = []
        self.disobedience: list[tuple[str, float]] = []
        self._changed = asyncio.Event()
        self.process = WorkerProcess(
            launch, self._on_event, self._on_output, self._note(self.ends.append), self._on_disobedience
        )

    def _note(self, keep: Callable[[WorkerExit], None]) -> Callable[[WorkerExit], None]:
        def note(end: WorkerExit) -> None:
            keep(end)
            self._changed.set()

        return note

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    def _on_output(self, data: bytes) -> None:
        self.output += data
        self._changed.set()

    def _on_disobedience(self, command: str, limit_s: float) -> None:
        self.disobedience.append((command, limit_s))
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60.0):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def ready(self) -> None:
        await self.until(lambda: any(isinstance(event, WorkerReady) for event in self.events))

    async def end(self) -> WorkerExit:
        await self.until(lambda: self.ends)
        (end,) = self.ends
        return end


@asynccontextmanager
async def worker(root: Path, program: str, **launch: object) -> AsyncIterator[Heard]:
    """Start a program as a worker; it is gone at the end."""
    command = (sys.executable, "-c", HEAD + program, CONTROL_FD_PLACE)
    heard = Heard(Launch(command, **launch))  # type: ignore[arg-type]
    lock = LockFile(root / "worker.lock")
    assert lock.try_lock()
    heard.process.start(lock)
    lock.close()
    try:
        yield heard
    finally:
        heard.process.kill()
        await heard.end()


async def stopped(heard: Heard) -> None:
    """Wait until the kernel has stopped the worker: in a thread, because a timer of this loop sends the signal."""
    await asyncio.to_thread(os.waitid, os.P_PID, heard.process.pid, os.WSTOPPED | os.WNOWAIT)


@go
async def test_what_was_said_last_is_heard_before_the_end_is_told(tmp_path: Path) -> None:
    program = "say(READY, *[STEP] * 500, TrainingFinished(step=9))\nprint('bye', end='')"
    async with worker(tmp_path, program) as heard:
        assert await heard.end() == WorkerExit(returncode=0, finished=True)
        assert [type(event) for event in heard.events] == [WorkerReady, *[StepDone] * 500, TrainingFinished]
        assert heard.output == b"bye"
        process = heard.process
        assert process.phase is WorkerPhase.ENDED
        for order in (process.pause, process.resume, process.leave, process.kill, process.checkpoint):
            order()  # too late, and no error
        assert process.requested is RequestedState.TRAIN


@go
async def test_its_own_reason_is_kept_for_the_end(tmp_path: Path) -> None:
    async with worker(tmp_path, "say(TrainingFailed(code='E', message='too big'))\nsys.exit(3)") as heard:
        assert await heard.end() == WorkerExit(returncode=3, failure=TrainingFailed(code="E", message="too big"))


@go
async def test_lines_that_are_no_events_go_to_the_log_and_the_rest_is_heard(tmp_path: Path) -> None:
    program = "line.sendall(b'what?\\n')\nsay(READY)\nhear(LeaveNow)"
    async with worker(tmp_path, program) as heard:
        await heard.ready()
        assert heard.output.startswith(b"port-agent: ignored from the worker: not a message of version 1")
        assert b"what?" in heard.output


@go
async def test_a_line_without_an_end_is_the_end(tmp_path: Path) -> None:
    async with worker(tmp_path, f"line.sendall(b'x' * {MAX_LINE_BYTES + 2})\nsignal.pause()") as heard:
        assert (await heard.end()).returncode == -signal.SIGKILL
        assert heard.disobedience == [("an event line without an end", 0.0)]


@go
async def test_a_worker_that_obeys_needs_no_signal(tmp_path: Path) -> None:
    program = """
say(READY)
hear(PauseTraining); say(WorkerPaused(step=0)); print("still", flush=True)
hear(ResumeTraining); say(WorkerResumed(step=0))
hear(LeaveNow); sys.exit(4)
"""
    async with worker(tmp_path, program) as heard:
        process = heard.process
        await heard.ready()
        process.pause()
        await heard.until(lambda: process.phase is WorkerPhase.PAUSED)
        process.pause()  # said once
        process.resume()
        await heard.until(lambda: process.phase is WorkerPhase.TRAINING)
        process.leave()
        end = await heard.end()
        assert (end.returncode, end.asked_to_leave, end.killed_after_s) == (4, True, None)
        assert heard.disobedience == []


@go
async def test_a_worker_that_does_not_pause_is_stopped_until_it_may_go_on(tmp_path: Path) -> None:
    async with worker(tmp_path, "say(READY)\nhear(ResumeTraining)\nsay(STEP)\nsignal.pause()") as heard:
        process = heard.process
        await heard.ready()
        process.pause()
        await heard.until(lambda: heard.disobedience)
        assert heard.disobedience == [("pause", worker_process.PAUSE_PATIENCE_S)]
        assert process.phase is WorkerPhase.PAUSED
        await stopped(heard)
        process.resume()
        await heard.until(lambda: process.phase is WorkerPhase.TRAINING)
        assert process_state(process.pid) in ("S", "R", "")


@go
async def test_a_worker_that_still_starts_is_stopped_without_a_reproach(tmp_path: Path) -> None:
    """Importing torch takes seconds; nobody listens then, and nothing is trained either."""
    async with worker(tmp_path, "print('imports', flush=True)\nsignal.pause()") as heard:
        process = heard.process
        await heard.until(lambda: heard.output)
        process.pause()
        await stopped(heard)
        assert (process.phase, heard.disobedience) == (WorkerPhase.PAUSED, [])
        process.leave()
        assert process_state(process.pid) != "T", "it must be able to hear that it is to leave"


@go
async def test_a_worker_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    async with worker(tmp_path, DEAF) as heard:
        await heard.ready()
        heard.process.pause()
        await heard.until(lambda: heard.disobedience)
        heard.process.leave()
        end = await heard.end()
        assert (end.returncode, end.asked_to_leave) == (-signal.SIGKILL, True)
        assert end.killed_after_s == worker_process.LEAVE_PATIENCE_S
        assert [command for command, _ in heard.disobedience] == ["pause", "leave"]


@go
async def test_a_worker_may_commit_before_it_leaves(tmp_path: Path) -> None:
    program = """
say(READY)
for text in line.makefile("rb"):
    command = decode_command(text)
    if isinstance(command, LeaveNow):
        say(CheckpointWritten(step=7, bytes=1, wall_s=command.within_s))
        sys.exit(75)
"""
    async with worker(tmp_path, program) as heard:
        await heard.ready()
        heard.process.leave(9.0)
        end = await heard.end()
        assert (end.returncode, end.asked_to_leave, end.killed_after_s) == (75, True, None)
        assert heard.events[-1] == CheckpointWritten(step=7, bytes=1, wall_s=9.0)


@go
async def test_a_shorter_time_to_leave_holds_and_a_longer_one_does_not(tmp_path: Path) -> None:
    async with worker(tmp_path, DEAF) as heard:
        await heard.ready()
        heard.process.leave(600.0)
        heard.process.leave(0.0)
        heard.process.leave(600.0)
        end = await heard.end()
        assert end.killed_after_s == worker_process.LEAVE_PATIENCE_S


@go
async def test_a_worker_that_still_starts_is_killed_without_a_reproach(tmp_path: Path) -> None:
    async with worker(tmp_path, "print('imports', flush=True)\nsignal.pause()") as heard:
        await heard.until(lambda: heard.output)
        heard.process.cancel()
        end = await heard.end()
        assert end.cancelled and end.killed_after_s is not None and heard.disobedience == []


@go
async def test_who_finished_before_hearing_of_it_was_not_cancelled(tmp_path: Path) -> None:
    async with worker(tmp_path, "say(READY)\nhear(LeaveNow)\nsay(TrainingFinished(step=9))") as heard:
        await heard.ready()
        heard.process.leave()
        heard.process.cancel()
        end = await heard.end()
        assert (end.finished, end.cancelled, end.returncode) == (True, False, 0)


@go
async def test_what_it_is_started_with(tmp_path: Path) -> None:
    program = """
import json, os, resource
core, data = (resource.getrlimit(what)[0] for what in (resource.RLIMIT_CORE, resource.RLIMIT_DATA))
print(json.dumps([os.getcwd(), os.environ["MORE"], core, data, os.getsid(0) == os.getpid(), sys.stdin.read()]))
"""
    limit = 1 << 31
    async with worker(tmp_path, program, data_limit_bytes=limit, environment={"MORE": "yes"}) as heard:
        await heard.end()
        assert json.loads(heard.output) == [str(NEUTRAL_DIRECTORY), "yes", 0, limit, True, ""]


@go
async def test_it_holds_the_lock_as_long_as_it_lives(tmp_path: Path) -> None:
    async with worker(tmp_path, DEAF) as heard:
        await heard.ready()
        lock = LockFile(tmp_path / "worker.lock")
        assert not lock.try_lock(), "the supervisor has let go of it"
        heard.process.kill()
        await heard.end()
        assert lock.try_lock()
        lock.close()


@go
async def test_a_process_that_cannot_start_leaves_nothing_open(tmp_path: Path) -> None:
    lock = LockFile(tmp_path / "worker.lock")
    heard = Heard(Launch(("true",), environment={"WORDS": "x" * (1 << 18)}))
    before = os.dup(0)
    os.close(before)
    with pytest.raises(OSError, match="Argument list too long"):
        heard.process.start(lock)
    after = os.dup(0)
    os.close(after)
    assert before == after and heard.process.pid == 0
    lock.close()


@LINUX
@go
async def test_the_belt_is_widened_and_never_made_narrower(tmp_path: Path) -> None:
    async with worker(tmp_path, DEAF, data_limit_bytes=1 << 31) as heard:
        await heard.ready()
        for asked, limit in ((1 << 32, 1 << 32), (1 << 30, 1 << 32)):
            heard.process.widen_limit(asked)
            assert resource.prlimit(heard.process.pid, resource.RLIMIT_DATA)[0] == limit
        heard.process.kill()
        await heard.end()
        heard.process.widen_limit(1 << 33)  # it has just ended


@LINUX
@go
async def test_a_worker_without_a_belt_gets_none(tmp_path: Path) -> None:
    async with worker(tmp_path, DEAF) as heard:
        await heard.ready()
        before = resource.prlimit(heard.process.pid, resource.RLIMIT_DATA)
        heard.process.widen_limit(1 << 32)
        assert resource.prlimit(heard.process.pid, resource.RLIMIT_DATA) == before
