"""The worker process: trains one bundle, tells its supervisor how it goes, pauses and leaves when told.

`python -m agent.train.worker --bundle job.port --state-dir DIR --control-fd N ...`; started by the supervisor and by
`port-agent train` (see `agent.train.launch`), which prepare its malloc. Exit codes: 0 finished; 75 left on request,
resumable; 2 the job can never run as it is; 1 other failure.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.train.channel import Channel
from agent.train.executor import GraphChangedError, Interrupted
from agent.train.malloc import active
from agent.train.state import Commit
from agent.train.trainer import Evaluation, MismatchError, StepEvent, Trainer, TrainOptions, step_payload
from planner.bundle import Bundle
from planner.code_pages import release_code_pages
from planner.errors import PortError
from planner.resident import peak_resident_bytes, reset_peak, resident_bytes
from planner.units import parse_bytes

LEFT = 75
"""EX_TEMPFAIL: left on request, can be resumed."""


_STACK_BYTES = 1 << 20
"""Of the page thread and the update thread: the system's 8 MiB each would count against RLIMIT_DATA."""


class _Control:
    """What the supervisor wants; set by the control thread, obeyed between two instructions."""

    def __init__(self, channel: Channel | None) -> None:
        self.channel = channel
        self.trainer: Trainer | None = None
        self._changed = threading.Condition()
        self._paused = self._leaving = self.stopping = False
        self._plan: tuple[int, str] | None = None
        self.checkpoint_wanted = False

    def handle(self, message: dict[str, Any]) -> None:
        with self._changed:
            match message.get("cmd"):
                case "pause":
                    self._paused = True
                case "resume":
                    self._paused = False
                case "leave":
                    self._leaving = True
                case "stop":
                    self.stopping = True
                case "checkpoint":
                    self.checkpoint_wanted = True
                case "plan" if isinstance(message.get("plan"), int):
                    self._plan = message["plan"], str(message.get("reason", ""))
            self._changed.notify_all()
        if (self._paused or self._leaving) and self.trainer:
            self.trainer.interrupt()

    def leave(self) -> None:
        self.handle({"cmd": "leave"})

    def gate(self) -> None:
        """Wait while paused; raise Interrupted to leave."""
        with self._changed:
            if self._paused and not self._leaving:
                self._tell("paused")
                while self._paused and not self._leaving:
                    self._changed.wait()
                if not self._leaving:
                    self._tell("resumed")
            if self._leaving:
                raise Interrupted("left on request")

    def take_plan(self) -> tuple[int, str] | None:
        with self._changed:
            plan, self._plan = self._plan, None
            return plan

    def _tell(self, event: str) -> None:
        if self.channel and self.trainer:
            self.channel.send({"event": event, "step": self.trainer.step})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker and return its exit code."""
    arguments = _parser().parse_args(argv)
    threading.stack_size(_STACK_BYTES)
    channel = Channel(arguments.control_fd) if arguments.control_fd is not None else None
    control = _Control(channel)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the front end decides
    signal.signal(signal.SIGTERM, lambda *_: control.leave())
    if channel:
        channel.listen(control.handle, control.leave)
    try:
        return _train(arguments, channel, control)
    except Interrupted:
        return LEFT
    except (PortError, OSError, RuntimeError, MemoryError) as error:
        code = _exit_code(error)
        if channel:
            message = {"event": "failed", "code": type(error).__name__, "message": str(error), "retry": code != 2}
            channel.send(message)
        else:
            sys.stderr.write(f"port-agent worker: {error}\n")
        return code


def _exit_code(error: Exception) -> int:
    if isinstance(error, GraphChangedError | MismatchError):
        return 2
    return error.exit_code if isinstance(error, PortError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agent.train.worker", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--page-dir", type=Path, help="where temporaries are paged to; default: the state directory")
    parser.add_argument("--control-fd", type=int)
    parser.add_argument("--plan", type=int, default=0)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", type=Path, help="train on the .npz and .safetensors files of this directory")
    parser.add_argument("--round", type=int, default=0, help="a new number counts epochs anew, weights go on")
    parser.add_argument("--checkpoint-every", type=int, default=1)
    parser.add_argument("--verify", type=int, default=0)
    parser.add_argument(
        "--digest", action="store_true", help="report a checksum over all persistent tensors at the end"
    )
    parser.add_argument("--read-limit", help="throttle reads to this many bytes per second")
    parser.add_argument("--write-limit", help="throttle writes to this many bytes per second")
    return parser


def _train(arguments: argparse.Namespace, channel: Channel | None, control: _Control) -> int:
    def tell(message: dict[str, Any]) -> None:
        if channel:
            channel.send(message)

    bundle = Bundle(arguments.bundle)
    options = TrainOptions(
        state_dir=arguments.state_dir, page_dir=arguments.page_dir or arguments.state_dir, plan=arguments.plan,
        steps=arguments.steps, epochs=arguments.epochs or 1, data=arguments.data, round=arguments.round, checkpoint_every=arguments.checkpoint_every, verify=arguments.verify,
        read_bytes_per_s=float(parse_bytes(arguments.read_limit)) if arguments.read_limit else None,
        write_bytes_per_s=float(parse_bytes(arguments.write_limit)) if arguments.write_limit else None,
    )  # fmt: skip
    trainer = Trainer(bundle, options)
    control.trainer = trainer
    trainer.gate = control.gate
    try:
        return _run(trainer, arguments, control, tell)
    finally:
        trainer.close()


def _run(trainer: Trainer, arguments: argparse.Namespace, control: _Control, tell: Any) -> int:
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


def _evaluate(trainer: Trainer, tell: Any) -> Evaluation | None:
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


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's own teardown takes longer than the second that leaving may take
