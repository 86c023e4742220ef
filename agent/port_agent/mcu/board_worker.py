"""The process that runs one microcontroller job for the supervisor.

`python -m port_agent.mcu.board_worker --bundle PATH ...`.

The bundle is a job.json or the directory of a compiled model. It uses the workers' protocol, and does not import torch.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from port_agent.mcu.board.board_errors import McuError
from port_agent.mcu.job import BoardJobSpec, open_job, read_job, with_settings
from port_agent.mcu.snapshot import begin_round
from port_agent.mcu.trainer import BoardEvaluation, BoardInterrupted, BoardTrainer, Event, Progress, SnapshotTaken
from port_agent.worker.control import Control, Emit, LeftOnRequest
from port_agent.worker.protocol import (
    CheckpointWritten,
    DeviceInterrupted,
    EvaluationDone,
    StepDone,
    TrainingFinished,
    WorkerReady,
)
from port_agent.worker.serve import serve
from port_agent.worker.worker_options import BoardOptions
from port_planner.base.errors import ExitCode
from port_planner.base.process_memory import peak_resident_bytes

LEAVE_S = 0.9
"""Seconds in which a worker must leave.

A request in flight may take longer; it is then abandoned, and the next start uses the snapshot.
"""
_LOOK_FOR_BOARD_S = 2.0


class _AttachedBoard:
    """The board's training for the control, which acts between two requests, so that nothing interrupts one."""

    def __init__(self) -> None:
        self.trainer: BoardTrainer | None = None

    @property
    def step(self) -> int:
        return 0 if self.trainer is None else self.trainer.position.step

    def interrupt(self) -> None:
        """Do nothing: a request is short, and `Control.waits_for_trainer` is checked after each."""


def report(emit: Emit, total_steps: Callable[[], int]) -> Callable[[Event], None]:
    """Return the listener that reports a trainer's events to the supervisor."""
    cpu = time.process_time()
    best = -1.0

    def listen(event: Event) -> None:
        nonlocal cpu, best
        match event:
            case Progress():
                now = time.process_time()
                emit(_step_done(event, now - cpu, total_steps()))
                cpu = now
            case BoardEvaluation():
                is_best, best = event.accuracy > best, max(best, event.accuracy)
                emit(EvaluationDone(step=event.step, loss=event.loss, metric=event.accuracy, best=is_best))
            case SnapshotTaken():
                emit(CheckpointWritten(step=event.step, bytes=event.size_bytes, wall_s=event.wall_s))
            case BoardInterrupted():
                emit(DeviceInterrupted(reason=event.reason, step=event.resumed_at))

    return listen


def _step_done(event: Progress, cpu_s: float, total_steps: int) -> StepDone:
    position = event.position
    return StepDone(
        step=position.step,
        epoch=position.epoch,
        loss=position.loss_sum / max(1, position.index),
        wall_s=event.wall_s,
        cpu_s=cpu_s,
        phases_s={"device": event.wall_s},
        samples=event.samples,
        total_steps=total_steps,
        peak_rss_bytes=peak_resident_bytes(),
    )


def train(control: Control, emit: Emit, spec: BoardJobSpec, state_dir: Path) -> None:
    """Run the job to its end; raises LeftOnRequest if asked to leave."""
    board = _AttachedBoard()
    control.attach(board)
    listen = report(emit, lambda: 0 if board.trainer is None else board.trainer.total_steps)
    trainer, simulator = open_job(spec, state_dir, listen, control.wait)
    board.trainer = trainer
    with simulator or contextlib.nullcontext():
        _connect(control, emit, trainer)
        emit(WorkerReady(pid=os.getpid(), step=trainer.position.step, total_steps=trainer.total_steps))
        while not trainer.run(lambda: control.waits_for_trainer):
            _obey(control, trainer)
        checksum = trainer.write_result(spec.out)
        out = None if spec.out is None else str(spec.out)
        emit(TrainingFinished(step=trainer.position.step, out=out, out_checksum=checksum))


def _connect(control: Control, emit: Emit, trainer: BoardTrainer) -> None:
    """Connect, waiting for the board to be plugged in.

    Raises LeftOnRequest if asked to leave meanwhile.
    """
    while not control.leaving and not control.stopping:
        try:
            trainer.start()
            return
        except McuError as error:
            if error.exit_code == ExitCode.IMPOSSIBLE:
                raise
            emit(DeviceInterrupted(reason=str(error)))
            control.wait(_LOOK_FOR_BOARD_S)
    raise LeftOnRequest("left before the board was connected")


def _obey(control: Control, trainer: BoardTrainer) -> None:
    """Execute the requests between two board requests; raises LeftOnRequest to leave."""
    if control.take_checkpoint() or control.stopping:
        with contextlib.suppress(McuError):
            trainer.take_snapshot()
    try:
        control.gate()
        if control.stopping:
            raise LeftOnRequest("stopped on request")
    except LeftOnRequest:
        with contextlib.suppress(McuError):
            trainer.leave()
        raise


def main(words: Sequence[str] | None = None) -> ExitCode:
    """Run one job; return its exit code."""
    options = BoardOptions.parse(words, program="port_agent.mcu.board_worker")

    def work(control: Control, emit: Emit) -> None:
        spec = _job(options)
        if options.round is not None:
            options.state_dir.mkdir(parents=True, exist_ok=True)
            begin_round(options.state_dir, options.round)
        train(control, emit, spec, options.state_dir)

    return serve(options.control_fd, work, leave_patience_s=LEAVE_S)


def _job(options: BoardOptions) -> BoardJobSpec:
    """Return the job of the bundle, with values of the command line instead of its own."""
    given: dict[str, Any] = {
        "data": options.data,
        "test": options.test,
        "out": options.out,
        "board": options.board,
        "port": options.port,
        "serial": options.serial,
        "simulate": options.simulate or None,
        "shard": options.shard,
    }
    spec = replace(read_job(options.bundle), **{name: value for name, value in given.items() if value is not None})
    return with_settings(spec, epochs=options.epochs, steps=options.steps, snapshot_every=options.checkpoint_every)


if __name__ == "__main__":
    raise SystemExit(main())
