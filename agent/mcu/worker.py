"""The process that runs one microcontroller job for the supervisor: `python -m agent.mcu.worker --job PATH ...`.

Speaks the workers' JSON lines (version 1) over an inherited socket: events out, commands in. Exit codes as for every
worker: 0 finished, 75 left on request and resumable, 2 can never run as it is, 1 other failure. Imports no torch.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agent.mcu.errors import McuError
from agent.mcu.job import BoardJobSpec, open_job, read_job, with_settings
from agent.mcu.snapshot import begin_round
from agent.mcu.trainer import BoardEvaluation, BoardInterrupted, BoardTrainer, Event, Progress, SnapshotTaken
from planner.ir.errors import PortError

VERSION = 1
FINISHED, FAILED, IMPOSSIBLE, LEFT = 0, 1, 2, 75
LEAVE_S = 0.9
"""A request in flight may take longer than the second that "leave" allows; then it is given up, and the next start
goes back to the snapshot."""


class Control:
    """The socket to the supervisor; without one (started by hand) events go to standard output."""

    def __init__(self, descriptor: int | None) -> None:
        self._socket = socket.socket(fileno=descriptor) if descriptor is not None else None
        self._lock = threading.Lock()
        self.leaving = threading.Event()
        self.paused = threading.Event()
        self.wake = threading.Event()
        self.snapshot_wanted = threading.Event()

    def start(self) -> None:
        """Listen for commands."""
        if self._socket is not None:
            threading.Thread(target=self._listen, name="control", daemon=True).start()

    def send(self, event: str, **fields: object) -> None:
        """Send one event; a supervisor that has gone away is noticed by the listener."""
        line = json.dumps({"v": VERSION, "event": event, **fields}).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.sendall(line)
            else:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()

    def leave(self) -> None:
        """Stop soon; if a request hangs, stop anyway: every file on disk is whole at every moment."""
        if self.leaving.is_set():
            return
        self.leaving.set()
        self.wake.set()
        timer = threading.Timer(LEAVE_S, os._exit, (LEFT,))
        timer.daemon = True
        timer.start()

    def wait(self, seconds: float) -> None:
        """Sleep, but not past a command."""
        self.wake.wait(seconds)
        if not self.leaving.is_set():
            self.wake.clear()

    def _listen(self) -> None:
        if self._socket is None:
            return
        pending = b""
        while True:
            try:
                piece = self._socket.recv(4096)
            except OSError:
                piece = b""
            if not piece:
                self.leave()  # the supervisor died
                return
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                self._obey(line)

    def _obey(self, line: bytes) -> None:
        try:
            command = json.loads(line).get("cmd")
        except (ValueError, AttributeError):
            return
        match command:
            case "pause":
                self.paused.set()
            case "resume":
                self.paused.clear()
            case "leave":
                self.leave()
            case "checkpoint":
                self.snapshot_wanted.set()
        self.wake.set()


def report(control: Control, trainer: Callable[[], BoardTrainer]) -> Callable[[Event], None]:
    """Return the listener that turns a trainer's events into messages."""
    cpu = time.process_time()
    best = -1.0

    def listen(event: Event) -> None:
        nonlocal cpu, best
        match event:
            case Progress():
                now = time.process_time()
                position = event.position
                control.send(
                    "step", step=position.step, epoch=position.epoch, loss=position.loss_sum / max(1, position.index),
                    wall_s=event.wall_s, cpu_s=now - cpu, phases_s={"device": event.wall_s}, paged_in_bytes=0,
                    paged_out_bytes=0, hidden_s=0.0, peak_rss_bytes=None, planned_s=None, planned_joules=None,
                    samples=event.samples, total_steps=trainer().total_steps,
                )  # fmt: skip
                cpu = now
            case BoardEvaluation():
                is_best, best = event.accuracy > best, max(best, event.accuracy)
                control.send("eval", step=event.step, loss=event.loss, metric=event.accuracy, best=is_best)
            case SnapshotTaken():
                control.send("checkpoint", step=event.step, bytes=event.size_bytes, wall_s=event.wall_s)
            case BoardInterrupted():
                control.send("interrupted", reason=event.reason, step=event.resumed_at)

    return listen


def train(control: Control, spec: BoardJobSpec, state_dir: Path) -> int:
    """Run the job to its end or until asked to leave; return the exit code."""
    holder: list[BoardTrainer] = []
    trainer, simulator = open_job(spec, state_dir, report(control, lambda: holder[0]), control.wait)
    holder.append(trainer)
    with simulator or contextlib.nullcontext():
        if not _start(control, trainer):
            return LEFT
        control.send("ready", pid=os.getpid(), step=trainer.position.step, total_steps=trainer.total_steps, plan=0,
                     planned_peak_bytes=None)  # fmt: skip
        while True:
            done = trainer.run(
                lambda: control.leaving.is_set() or control.paused.is_set() or control.snapshot_wanted.is_set()
            )
            if done:
                out = trainer.write_result(spec.out)
                control.send("finished", step=trainer.position.step, out=None if out is None else str(out))
                return FINISHED
            if control.leaving.is_set():
                with contextlib.suppress(McuError):
                    trainer.leave()
                return LEFT
            if control.snapshot_wanted.is_set():
                control.snapshot_wanted.clear()
                with contextlib.suppress(McuError):
                    trainer.take_snapshot()
            _pause(control, trainer)


def _start(control: Control, trainer: BoardTrainer) -> bool:
    """Connect, waiting for the board to be plugged in; False when asked to leave meanwhile."""
    while not control.leaving.is_set():
        try:
            trainer.start()
            return True
        except McuError as error:
            if error.exit_code == IMPOSSIBLE:
                raise
            control.send("interrupted", reason=str(error), step=None)
            control.wait(2.0)
    return False


def _pause(control: Control, trainer: BoardTrainer) -> None:
    if not control.paused.is_set():
        return
    control.send("paused", step=trainer.position.step)
    while control.paused.is_set() and not control.leaving.is_set():
        control.wait(60.0)
    if not control.leaving.is_set():
        control.send("resumed", step=trainer.position.step)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line: the workers' common options, and those of a board."""
    parser = argparse.ArgumentParser(prog="python -m agent.mcu.worker")
    parser.add_argument("--job", "--bundle", dest="job", type=Path, required=True, help="job.json or a model directory")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--control-fd", type=int)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--checkpoint-every", type=int, help="samples between snapshots")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plan", type=int, help="accepted and ignored: a board has one plan, its firmware")
    parser.add_argument("--round", type=int, help="number of the round, for a job that waits for new data")
    parser.add_argument("--test", type=Path)
    parser.add_argument("--board")
    parser.add_argument("--port")
    parser.add_argument("--serial")
    parser.add_argument("--simulate", action="store_true")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job; return its exit code."""
    arguments = parse(argv)
    control = Control(arguments.control_fd)
    signal.signal(signal.SIGTERM, lambda *_: control.leave())
    control.start()
    try:
        spec = read_job(arguments.job)
        given = {
            "data": arguments.data, "test": arguments.test, "out": arguments.out, "board": arguments.board, "port": arguments.port,
            "serial": arguments.serial, "simulate": arguments.simulate or None,
        }  # fmt: skip
        spec = replace(spec, **{name: value for name, value in given.items() if value is not None})
        spec = with_settings(
            spec, epochs=arguments.epochs, steps=arguments.steps, snapshot_every=arguments.checkpoint_every
        )
        if arguments.round is not None:
            arguments.state_dir.mkdir(parents=True, exist_ok=True)
            begin_round(arguments.state_dir, arguments.round)
        return train(control, spec, arguments.state_dir)
    except PortError as error:
        retry = error.exit_code != IMPOSSIBLE
        control.send("failed", code=type(error).__name__, message=str(error), retry=retry)
        return FAILED if retry else IMPOSSIBLE


if __name__ == "__main__":
    raise SystemExit(main())
