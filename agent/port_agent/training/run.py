"""One run of a worker, from the bundle to the last commit: its reports, and when it evaluates,
switches plans and stops.
"""

import contextlib
import os
from pathlib import Path

from port_agent.malloc import active
from port_agent.paging.pager import PageError
from port_agent.system.locks import LockFile
from port_agent.training.result import check_result
from port_agent.training.state.checkpoint import Commit
from port_agent.training.trainer import Evaluation, StepEvent, Trainer, step_message
from port_agent.worker.blas_buffer import release_blas_buffer
from port_agent.worker.control import Control, Emit, LeftOnRequest
from port_agent.worker.protocol import (
    COSTS_IN_A_LINE,
    CheckpointWritten,
    EvaluationDone,
    PackingProbed,
    PlanSwitched,
    StateRecovered,
    TrainingFinished,
    WorkerLeaving,
    WorkerReady,
)
from port_agent.worker.worker_options import TorchOptions
from port_planner.base.code_pages import release_code_pages
from port_planner.base.errors import PortError
from port_planner.base.process_memory import peak_resident_bytes, reset_peak, resident_bytes, untouched_block_bytes
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.revision import read_revision, revised


class StateInUseError(PortError):
    """Another run holds the state directory."""


def train(given: TorchOptions, control: Control, emit: Emit) -> None:
    """Train by the worker's command line, obeying `control`.

    Raises LeftOnRequest if it left on request.
    """
    release_code_pages()
    release_blas_buffer()
    bundle = Bundle(given.bundle)
    if given.revision is not None:
        bundle = revised(bundle, read_revision(given.revision))
    trainer = Trainer(bundle, given)
    lock = _lock_state(given.state_dir)
    trainer.executors.gate = lambda: control.gate(trainer.finishes_first)
    control.attach(trainer)
    try:
        _TrainingRun(trainer, given, control, emit).train()
    finally:
        trainer.close()
        lock.close()


def _lock_state(directory: Path) -> LockFile:
    """Return the lock of a state directory; two runs in one directory would mistake each
    other's commits for their own.
    """
    lock = LockFile(directory / "lock")
    holder = lock.hold()
    if holder is not None:
        raise StateInUseError(
            f"process {holder or 'unknown'} is training in {directory}; wait until it ends, or give this run its own "
            "--state-dir"
        )
    return lock


class _TrainingRun:
    """One run of a trainer: its reports to the supervisor, and its requests between two steps."""

    def __init__(self, trainer: Trainer, given: TorchOptions, control: Control, emit: Emit) -> None:
        self.trainer, self.given, self.control, self.emit = trainer, given, control, emit

    def train(self) -> None:
        """Train to the end.

        Raises LeftOnRequest if it left on request, after which the last commit is valid, and others as `Trainer.train`
        does.
        """
        if self.given.out:
            check_result(self.trainer.bundle, self.given.out)
        self._begin()
        try:
            self.trainer.train(self._stepped, self._committed, self._finished, self.emit)
        except LeftOnRequest:
            if self.control.leaving:
                self.emit(WorkerLeaving(step=self.trainer.step))
            _keep_no_freed_blocks()
            with contextlib.suppress(PageError):  # the previous commit stays valid
                self.trainer.commit_finished_steps(self.control.leave_within_s, self._committed)
            raise

    def _begin(self) -> None:
        trainer, emit = self.trainer, self.emit
        _limit_cache(trainer, new_plan=True)
        commit = trainer.start()
        start_peak = peak_resident_bytes()
        release_code_pages()
        emit(
            WorkerReady(
                pid=os.getpid(),
                step=commit.step,
                total_steps=trainer.total_steps,
                plan=trainer.programs.plan_index,
                planned_peak_bytes=trainer.programs.peak_bytes,
                resident_bytes=resident_bytes(),
                start_peak_bytes=start_peak,
            )
        )
        if trainer.store.damage:
            emit(StateRecovered(step=commit.step, reason=trainer.store.damage))
        with contextlib.suppress(OSError):
            reset_peak()
        if commit.step == 0:
            _evaluate(trainer, emit)

    def _committed(self, commit: Commit, wall_s: float) -> None:
        self.emit(CheckpointWritten(step=commit.step, bytes=self.trainer.commit_bytes, wall_s=wall_s))

    def _stepped(self, event: StepEvent) -> None:
        trainer = self.trainer
        self.emit(step_message(event, trainer.device_peak_bytes, trainer.device_excess_bytes))
        _limit_cache(trainer)
        if event.step % trainer.batching.per_epoch == 0:
            evaluation = _evaluate(trainer, self.emit)
            if evaluation and evaluation.best:
                _keep_best(trainer)
        if self.control.take_checkpoint():
            trainer.commit(self._committed)
        self._take_plan()
        if self.control.stopping:
            trainer.commit(self._committed)
            raise LeftOnRequest("stopped on request")
        if self.control.leaving:
            raise LeftOnRequest("left on request")

    def _take_plan(self) -> None:
        """Switch to the requested plan, or to one adapted to tensors that outgrew their reserved memory."""
        trainer, switch = self.trainer, self.control.take_plan()
        if switch is not None:
            trainer.use_plan(switch.plan)
        reason = trainer.programs.adapt() if switch is None else switch.reason
        if switch is not None or reason:
            _limit_cache(trainer, new_plan=True)
            self.emit(PlanSwitched(plan=trainer.programs.plan_index, reason=reason))

    def _finished(self) -> None:
        trainer, given, emit = self.trainer, self.given, self.emit
        untouched = untouched_block_bytes()
        for name, probe in trainer.executors.probes.items():
            costs = probe.costs()
            for start in range(0, len(costs), COSTS_IN_A_LINE):
                emit(PackingProbed(graph=name, costs=costs[start : start + COSTS_IN_A_LINE]))
        digest = trainer.digest() if given.digest else None
        checksum = trainer.save_weights(given.out) if given.out else None
        emit(
            TrainingFinished(
                step=trainer.step,
                out=str(given.out) if given.out else None,
                out_checksum=checksum,
                digest=digest,
                peak_rss_bytes=peak_resident_bytes(),
                untouched_block_bytes=untouched,
            )
        )


def _limit_cache(trainer: Trainer, *, new_plan: bool = False) -> None:
    """Limit the part of the budget that the allocator's blocks may take, including freed blocks kept for reuse.

    The limit is what the plan provides for them, or the peak of live blocks, part of which is in the plan's base.
    """
    allocator = active()
    if allocator is not None:
        if new_plan:
            allocator.reset_peak()
        devices = [c.device for c in trainer.bundle.costs.values()]
        base = max(d.base_bytes if d.host is None else d.host_base_bytes for d in devices)
        allocator.set_limit(max(trainer.programs.peak_bytes - base, allocator.peak_live_bytes()))


def _keep_no_freed_blocks() -> None:
    """Make the allocator release freed blocks from now on, and those that it kept for reuse."""
    allocator = active()
    if allocator is not None:
        allocator.set_limit(0)
        allocator.trim()


def _evaluate(trainer: Trainer, emit: Emit) -> Evaluation | None:
    evaluation = trainer.evaluate()
    if evaluation is not None:
        emit(
            EvaluationDone(
                step=evaluation.step,
                loss=evaluation.loss,
                metric=evaluation.metric,
                best=evaluation.best,
                paged_in_bytes=evaluation.paging.read_bytes,
                paged_out_bytes=evaluation.paging.written_bytes,
                unworn_bytes=evaluation.paging.unworn_bytes,
            )
        )
    return evaluation


def _keep_best(trainer: Trainer) -> None:
    path = trainer.options.state_dir / "best.safetensors"
    trainer.save_weights(path)
