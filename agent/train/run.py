"""One run of a worker, from the bundle to the last commit: what it tells, when it evaluates, switches plans and stops."""

import argparse
import contextlib
import os
from collections.abc import Callable
from typing import Any

from agent.malloc import active
from agent.train.checkpoint import Commit
from agent.train.trainer import Evaluation, StepEvent, Trainer, TrainOptions, step_payload
from agent.worker.commands import Control, Interrupted
from planner.ir.bundle.bundle import Bundle
from planner.ir.code_pages import release_code_pages
from planner.ir.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from planner.ir.units import parse_bytes

Tell = Callable[[dict[str, Any]], None]
"""Sends an event to the supervisor."""


def train(arguments: argparse.Namespace, control: Control, tell: Tell) -> int:
    """Train as the worker's command line says, obeying `control`; return the exit code."""
    release_code_pages()
    bundle = Bundle(arguments.bundle)
    options = TrainOptions(
        state_dir=arguments.state_dir, page_dir=arguments.page_dir or arguments.state_dir, plan=arguments.plan,
        steps=arguments.steps, epochs=arguments.epochs or 1, data=arguments.data, round=arguments.round,
        checkpoint_every=arguments.checkpoint_every, verify=arguments.verify,
        read_bytes_per_s=float(parse_bytes(arguments.read_limit)) if arguments.read_limit else None,
        write_bytes_per_s=float(parse_bytes(arguments.write_limit)) if arguments.write_limit else None,
    )  # fmt: skip
    trainer = Trainer(bundle, options)
    trainer.gate = control.gate
    control.attach(trainer)
    try:
        return _run(trainer, arguments, control, tell)
    finally:
        trainer.close()


def _run(trainer: Trainer, arguments: argparse.Namespace, control: Control, tell: Tell) -> int:
    _limit_cache(trainer, new_plan=True)
    commit = trainer.start()
    start_peak = peak_resident_bytes()
    release_code_pages()
    tell(
        {
            "event": "ready", "pid": os.getpid(), "step": commit.step, "total_steps": trainer.total_steps,
            "plan": trainer.plan_index, "planned_peak_bytes": trainer.planned_peak_bytes,
            "resident_bytes": resident_bytes(), "start_peak_bytes": start_peak,
        }
    )  # fmt: skip
    with contextlib.suppress(OSError):
        reset_peak()
    if commit.step == 0:
        _evaluate(trainer, tell)

    def on_commit(commit: Commit, wall_s: float) -> None:
        tell({"event": "checkpoint", "step": commit.step, "bytes": trainer.commit_bytes, "wall_s": wall_s})

    def on_step(event: StepEvent) -> None:
        tell(dict(step_payload(event)))
        _limit_cache(trainer)
        if event.step % trainer.steps_per_epoch == 0:
            evaluation = _evaluate(trainer, tell)
            if evaluation and evaluation.best:
                _keep_best(trainer)
        if control.checkpoint_wanted:
            control.checkpoint_wanted = False
            trainer.commit(on_commit)
        plan = control.take_plan()
        if plan is not None:
            trainer.use_plan(plan[0])
            _limit_cache(trainer, new_plan=True)
            tell({"event": "plan", "plan": plan[0], "reason": plan[1]})
        if control.stopping:
            trainer.commit(on_commit)
            raise Interrupted("stopped on request")

    trainer.train(on_step, on_commit)
    result: dict[str, Any] = {"event": "finished", "step": trainer.step, "out": None}
    if arguments.digest:
        result["digest"] = trainer.digest()
    if arguments.out:
        trainer.save_weights(arguments.out)
        result["out"] = str(arguments.out)
    result["peak_rss_bytes"] = peak_resident_bytes()
    tell(result)
    return 0


def _limit_cache(trainer: Trainer, *, new_plan: bool = False) -> None:
    """Tell the allocator how much of the budget blocks may take, freed ones kept for reuse included.

    That is what the plan has for them, or what live ones alone took at their peak: part of that is in the plan's base.
    """
    allocator = active()
    if allocator is not None:
        if new_plan:
            allocator.reset_peak()
        base = max(c.device.base_bytes for c in trainer.bundle.costs.values())
        allocator.set_limit(max(trainer.planned_peak_bytes - base, allocator.peak_live_bytes()))


def _evaluate(trainer: Trainer, tell: Tell) -> Evaluation | None:
    evaluation = trainer.evaluate()
    if evaluation is not None:
        tell(
            {
                "event": "eval", "step": evaluation.step, "loss": evaluation.loss, "metric": evaluation.metric,
                "best": evaluation.best, "paged_in_bytes": evaluation.paging.read_bytes,
                "paged_out_bytes": evaluation.paging.written_bytes,
            }
        )  # fmt: skip
    return evaluation


def _keep_best(trainer: Trainer) -> None:
    path = trainer.options.state_dir / "best.safetensors"
    trainer.save_weights(path)
