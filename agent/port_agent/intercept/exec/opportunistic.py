"""`exec --opportunistic`: a program attached to the daemon, which decides when it runs.

A separate thread holds the connection and obeys. To pause, it stops every operator before it starts. Then it stops any
code that touches a tensor (a long operator, compiled code, a thread outside the operators), and finally the program's
own children. To release memory, it also evicts all tensors to the page file. If that thread cannot run, guarded memory
obeys instead. Without a daemon nothing runs: the program waits, and attaches again.
"""

import _thread
import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from port_agent.guard import ProcessTable, active_guard
from port_agent.intercept.budget import Report
from port_agent.intercept.dispatch.mode import Interceptor
from port_agent.intercept.exec.children import Children
from port_agent.intercept.exec.step_figures import StepFigures
from port_agent.intercept.residency.memory import resident_now
from port_agent.paging.pager import PageError
from port_agent.worker.attach import AttachedLine, AttachError, AttachRequest, attach
from port_agent.worker.channel import Channel
from port_agent.worker.protocol import (
    Command,
    Event,
    LeaveNow,
    MemoryReleased,
    PauseTraining,
    ReleaseMemory,
    ResumeTraining,
    TrainingFailed,
    TrainingFinished,
    WorkerPaused,
    WorkerResumed,
    encode_message,
)

RETRY_S = 1.0
"""Seconds between attempts to find a lost daemon."""

CANCEL_PATIENCE_S = 10.0
"""Seconds for the clean-up after Ctrl-C, and again after SIGTERM; a program that ignores both stays paused."""

OPERATOR_PATIENCE_S = 0.05
"""Seconds for the current operator to end; a longer one is paused where it touches its tensors."""

_REPORT_S = 0.02
"""Seconds below which steps are reported together: a report costs 0.1 ms here, and as much in the daemon."""


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """How to attach: the daemon's control socket, and the job's name and limits."""

    socket: str
    name: str
    ram_bytes: int


class Opportunistic:
    """This process as an attached program. `report` returns its figures, and `emit` shows its user what happens."""

    def __init__(
        self,
        options: AttachOptions,
        interceptor: Interceptor,
        report: Callable[[], Report],
        emit: Callable[[str], None],
        processes: ProcessTable | None = None,
    ) -> None:
        """`processes`: processes of the program, whose tensors are guarded."""
        self.pauses = 0
        self.paused_s = 0.0
        self._options, self._interceptor, self._report, self._emit = options, interceptor, report, emit
        self._processes = processes
        self._guard = None if processes is None else active_guard()
        self._between_operators = True
        """Whether the program is paused while no operator is running."""
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._job: int | None = None
        self._channel: Channel | None = None
        self._line = -1
        self._held_since_s: float | None = None
        self._children = Children()
        self._emitted = False
        """Whether the user has been informed that the program waits."""
        self._steps = 0
        self._reporting = threading.Lock()
        self._reported = StepFigures.now(0, report())

    def start(self) -> None:
        """Attach, and let no operator run until the daemon allows it. Raises AttachError."""
        attached = self._attach()
        self._interceptor.when_interrupted = self._interrupted
        self._hold()
        self.pauses, self._emitted = 0, True
        self._emit(f"attached as job {attached.job} ({attached.name}); it runs when `port-agent status` says so")
        os.register_at_fork(after_in_child=self._close_in_child)
        atexit.register(self._children.go_on)  # before multiprocessing, which waits there for its processes
        register_optimizer_step_post_hook(self._step_done)
        _thread.start_new_thread(self._listen, ())

    def finish(self, error: BaseException | None) -> None:
        """Report how the program ended."""
        self._ended.set()
        self._children.go_on()
        self._report_steps()
        done = error is None or (isinstance(error, SystemExit) and not error.code)
        if done:
            self._send(TrainingFinished(step=self._steps, peak_rss_bytes=self._report().peak_resident_bytes))
        else:
            self._send(TrainingFailed(code=type(error).__name__, message=str(error) or type(error).__name__))

    # -- the connection

    def _attach(self) -> AttachedLine:
        options = self._options
        request = AttachRequest(
            name=options.name, ram_bytes=options.ram_bytes, pid=self._pid, step=self._steps, job=self._job
        )
        attached = attach(Path(options.socket), request)
        self._line = attached.line.fileno()
        self._watch_line()
        self._job, self._channel = attached.job, Channel(attached.line.detach())
        return attached

    def _watch_line(self, held: WorkerPaused | None = None, released: MemoryReleased | None = None) -> None:
        """Make guarded memory obey and answer the commands that this thread does not get to read."""
        if self._guard is not None:
            held = held or WorkerPaused(step=self._steps, waited_s=OPERATOR_PATIENCE_S)
            released = released or MemoryReleased(step=self._steps, resident_bytes=0, wall_s=OPERATOR_PATIENCE_S)
            self._guard.watch_line(self._line, encode_message(held), encode_message(released))

    def _listen(self) -> None:
        while self._channel is not None:
            for command in self._channel.commands_on_line():
                if self._ended.is_set():
                    return
                with contextlib.nullcontext() if self._guard is None else self._guard.obeying():
                    self._obey(command)
            if self._ended.is_set():
                return
            self._line = -1
            self._watch_line()
            self._channel.close()
            self._wait_for_daemon()

    def _wait_for_daemon(self) -> None:
        self._emit(f"the agent at {self._options.socket} is offline; paused until it is back")
        self._emitted = True
        self._hold()
        self._let_touch()  # the search for the agent may need a lock held by a thread that would be paused
        self._give_back()
        refusal = ""
        while not self._ended.wait(RETRY_S):
            try:
                self._attach()
            except AttachError as error:
                if error.status is not None and str(error) != refusal:
                    refusal = str(error)
                    self._emit(f"the agent rejects the program: {refusal}")
                continue
            self._emit("the agent is back")
            return

    def _send(self, event: Event) -> None:
        if self._channel is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):  # the listening thread notices that the daemon is gone
                self._channel.send(event)

    def _close_in_child(self) -> None:
        if self._channel is not None:
            self._channel.close()

    # -- obeying

    def _obey(self, command: Command) -> None:
        match command:
            case PauseTraining():
                self._stop()
            case ReleaseMemory():
                self._release(command.reason)
            case ResumeTraining():
                self._interceptor.limit_cpu(command.cpu_percent)
                self._go_on()
                self._send(WorkerResumed(step=self._steps))
            case LeaveNow():
                self._cancel()

    def _stop(self) -> None:
        paused = self._stopped()
        if self._guard is None:
            self._send(paused)
        else:
            self._watch_line(held=paused)
            self._guard.hold_and_report()

    def _stopped(self) -> WorkerPaused:
        begin_s, operator = time.perf_counter(), self._interceptor.operator_at_hand
        self._hold()
        waited_s = time.perf_counter() - begin_s
        self._report_steps()
        return WorkerPaused(step=self._steps, operator=operator or None, waited_s=waited_s)

    def _release(self, reason: str) -> None:
        begin_s = time.perf_counter()
        paused = self._stopped()
        if self._between_operators:
            self._send(paused)
        if reason:
            self._emitted = True
            self._emit(f"paused: {reason}")
        before = self._reported
        self._let_touch()  # tensors that are evicted between two operators may be packed
        self._give_back()
        self._reported = StepFigures.now(self._steps, self._report())
        released = MemoryReleased(
            step=self._steps,
            resident_bytes=resident_now(),
            wall_s=time.perf_counter() - begin_s,
            paged_out_bytes=self._reported.written_bytes - before.written_bytes,
            unworn_bytes=self._reported.unworn_bytes - before.unworn_bytes,
        )
        if self._guard is None:
            self._send(released)
        else:
            self._watch_line(released=released)
            self._guard.release_and_report()

    def _cancel(self) -> None:
        self._emit("cancelled: as with Ctrl-C")
        self._go_on()
        main = threading.main_thread().ident or self._pid
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.pthread_kill(main, number)
            if self._ended.wait(CANCEL_PATIENCE_S):
                return
        self._release("it was cancelled and does not end; kill it")

    def _hold(self) -> None:
        patience_s = threading.TIMEOUT_MAX if self._guard is None else OPERATOR_PATIENCE_S
        self._between_operators = self._interceptor.hold(patience_s)
        self._children.stop()
        if self._held_since_s is None:
            self._held_since_s = time.perf_counter()
            self.pauses += 1

    def _let_touch(self) -> None:
        if self._processes is not None:
            self._processes.resume()

    def _give_back(self) -> None:
        if not self._between_operators:
            return
        try:
            self._interceptor.give_back()
        except (PageError, MemoryError) as error:
            self._emit(f"not all memory could be given back: {error or 'none is left to do so'}")

    def _go_on(self) -> None:
        if self._held_since_s is not None:
            held_s = time.perf_counter() - self._held_since_s
            self.paused_s, self._held_since_s = self.paused_s + held_s, None
            self._reported = StepFigures.now(self._steps, self._report())
        if self._emitted:
            self._emitted = False
            self._emit("resumed")
        self._let_touch()
        self._children.go_on()
        self._interceptor.go_on()

    def _interrupted(self) -> None:
        self._let_touch()
        self._children.go_on()

    # -- steps

    def _step_done(self, *_: object) -> None:
        if os.getpid() == self._pid:
            self._steps += 1
            if time.perf_counter() - self._reported.wall_s >= _REPORT_S:
                self._report_steps()

    def _report_steps(self) -> None:
        with self._reporting:
            before, now = self._reported, StepFigures.now(self._steps, self._report())
            if now.steps == before.steps:
                return
            self._reported = now
        self._watch_line()
        self._send(now.step_since(before))
