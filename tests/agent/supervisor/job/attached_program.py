"""A program that attaches itself to a daemon and obeys, without torch: the real protocol over the real socket."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from port_agent.worker.attach import AttachRequest, attach
from port_agent.worker.channel import Channel
from port_agent.worker.protocol import (
    Command,
    Event,
    LeaveNow,
    MemoryReleased,
    PauseTraining,
    ReleaseMemory,
    ResumeTraining,
    StepDone,
    WorkerPaused,
    WorkerResumed,
)

MIB = 1 << 20


class ObedientProgram:
    """What `port_agent.intercept.exec.opportunistic` does on the line; `heard` are the commands."""

    def __init__(self, path: Path, *, name: str = "train", ram_bytes: int = 300 * MIB, job: int | None = None) -> None:
        attached = attach(path, AttachRequest(name=name, ram_bytes=ram_bytes, pid=os.getpid(), job=job))
        self.job, self.name = attached.job, attached.name
        self.heard: list[Command] = []
        self.step = 0
        self.answers = True
        self._told = threading.Condition()
        self._channel = Channel(attached.line.detach())
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def tell(self, event: Event) -> None:
        self._channel.send(event)

    def do_step(self, wall_s: float = 0.01, paged_out_bytes: int = 0, unworn_bytes: int = 0) -> None:
        """Say that a step is done."""
        self.step += 1
        self.tell(
            StepDone(
                step=self.step,
                epoch=0,
                loss=None,
                wall_s=wall_s,
                cpu_s=wall_s,
                phases_s={},
                paged_out_bytes=paged_out_bytes,
                unworn_bytes=unworn_bytes,
            )
        )

    def end(self) -> None:
        """End the line, as a killed process does."""
        self._channel.shut()
        self._thread.join(10.0)
        self._channel.close()

    def wait_for(self, kind: type[Command], patience_s: float = 60.0) -> None:
        """Wait until the program has received a command."""
        with self._told:
            told = self._told.wait_for(lambda: any(isinstance(c, kind) for c in self.heard), patience_s)
        assert told, self.heard

    def _listen(self) -> None:
        for command in self._channel.commands():
            with self._told:
                self.heard.append(command)
                self._told.notify_all()
            if self.answers:
                self._answer(command)

    def _answer(self, command: Command) -> None:
        match command:
            case PauseTraining():
                self.tell(WorkerPaused(step=self.step, operator="aten::mm", waited_s=0.3))
            case ReleaseMemory():
                self.tell(WorkerPaused(step=self.step))
                self.tell(MemoryReleased(step=self.step, resident_bytes=MIB, wall_s=0.1, paged_out_bytes=7 * MIB))
            case ResumeTraining():
                self.tell(WorkerResumed(step=self.step))
            case LeaveNow():
                self._channel.shut()


@contextmanager
def attached(path: Path, **said: object) -> Iterator[ObedientProgram]:
    """Attach a program, and end its line at the end."""
    program = ObedientProgram(path, **said)  # type: ignore[arg-type]
    try:
        yield program
    finally:
        program.end()
