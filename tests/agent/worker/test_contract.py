"""The contract of a worker, kept by the two real ones and by the one that stands for them in the supervisor's tests."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from port_agent.worker.protocol import (
    CheckpointWritten,
    Event,
    FailureCause,
    LeaveNow,
    PauseTraining,
    ResumeTraining,
    StepDone,
    StopAfterStep,
    TrainingFailed,
    TrainingFinished,
    WorkerPaused,
    WorkerReady,
    WorkerResumed,
    WriteCheckpoint,
)
from port_agent.worker.start import Worker, start_worker
from port_agent.worker.worker_options import BOARD_WORKER, TORCH_WORKER, WorkerOptions
from port_planner.base.errors import ExitCode
from tests.agent.jobs_small import endless_bundle
from tests.agent.mcu.small_model import make_samples, write_model

pytestmark = pytest.mark.process

E = TypeVar("E", bound=Event)
PATIENCE_S = 120
ENDLESS = 100_000


@dataclass(frozen=True)
class Kind:
    """A worker, and a bundle for it."""

    program: tuple[str, ...]
    bundle: Path

    def start(self, state: Path, *, steps: int = ENDLESS, **options: object) -> Worker:
        told = WorkerOptions(bundle=self.bundle, state_dir=state, steps=steps, **options)  # type: ignore[arg-type]
        command = [*self.program, *told.words()]
        return start_worker(command, limit_bytes=1 << 30, stderr=subprocess.DEVNULL)


def fake(folder: Path) -> Kind:
    """Return the worker of the supervisor's tests."""
    job = {"dimension": 8, "steps": 9, "instructions": 4, "instruction_s": 0.001, "checkpoint_every": 1000, "seed": 1}
    (folder / "fake.json").write_text(json.dumps(job))
    return Kind((sys.executable, "-m", "tests.agent.worker_program"), folder / "fake.json")


def board(folder: Path) -> Kind:
    """Return the worker of a simulated board."""
    rows, labels = make_samples(100)
    np.savez(folder / "data.npz", codes=np.frombuffer(b"".join(rows), np.int8).reshape(100, -1), y=np.array(labels))
    settings = {"epochs": ENDLESS, "snapshot_every": ENDLESS}
    places = {"model": str(write_model(folder / "model")), "data": str(folder / "data.npz")}
    content = {"v": 1, **places, "simulate": True, "board": "posix", "settings": settings}
    (folder / "job.json").write_text(json.dumps(content))
    return Kind(BOARD_WORKER, folder / "job.json")


@pytest.fixture(scope="module", params=["fake", "torch", "board"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "torch":
        return Kind(TORCH_WORKER, endless_bundle())
    return fake(folder) if request.param == "fake" else board(folder)


def until(events: Iterator[Event], wanted: type[E]) -> E:
    """Return the next event of this type."""
    for event in events:
        if isinstance(event, wanted):
            return event
    raise AssertionError(f"the worker ended without {wanted.__name__}")


def training(kind: Kind, state: Path) -> tuple[Worker, Iterator[Event]]:
    """Start an endless run; return it once it has done a step."""
    worker = kind.start(state, checkpoint_every=ENDLESS)
    events = worker.events()
    until(events, StepDone)
    return worker, events


def ended(worker: Worker, events: Iterator[Event]) -> list[Event]:
    """Return the rest of what a worker says that was asked to leave."""
    rest = list(events)
    assert worker.process.wait(PATIENCE_S) == ExitCode.LEFT
    return rest


def test_an_undisturbed_run(kind: Kind, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    worker = kind.start(tmp_path / "state", steps=5, out=out)
    first, *events, last = worker.events()
    assert worker.process.wait(PATIENCE_S) == ExitCode.DONE
    assert isinstance(first, WorkerReady)
    assert (first.pid, first.step, first.total_steps) == (worker.process.pid, 0, 5)
    steps = [event.step for event in events if isinstance(event, StepDone)]
    assert steps == sorted(set(steps)) and steps[-1] == 5
    assert any(isinstance(event, CheckpointWritten) and event.step == 5 for event in events)
    assert isinstance(last, TrainingFinished) and (last.step, last.out) == (5, str(out)) and out.stat().st_size > 0


def test_a_pause_holds_until_resume(kind: Kind, tmp_path: Path) -> None:
    worker, events = training(kind, tmp_path)
    worker.send(PauseTraining())
    paused = until(events, WorkerPaused)
    worker.send(ResumeTraining())
    resumed = next(events)
    assert resumed == WorkerResumed(step=paused.step), "nothing is said while paused"
    assert until(events, StepDone).step > paused.step
    worker.send(PauseTraining())
    until(events, WorkerPaused)
    worker.send(LeaveNow())
    assert not [event for event in ended(worker, events) if isinstance(event, StepDone)]


@pytest.mark.parametrize("way", ["command", "SIGTERM", "line"])
def test_leaving(kind: Kind, way: str, tmp_path: Path) -> None:
    worker, events = training(kind, tmp_path)
    if way == "command":
        worker.send(LeaveNow())
    elif way == "SIGTERM":
        worker.process.send_signal(signal.SIGTERM)
    else:
        worker.channel._socket.shutdown(socket.SHUT_RDWR)
    assert not [event for event in ended(worker, events) if isinstance(event, TrainingFinished | TrainingFailed)]


def test_a_checkpoint_on_request_is_where_a_killed_run_resumes(kind: Kind, tmp_path: Path) -> None:
    worker, events = training(kind, tmp_path)
    worker.send(WriteCheckpoint())
    written = until(events, CheckpointWritten)
    assert written.bytes > 0
    worker.process.kill()
    list(events)
    again = kind.start(tmp_path, checkpoint_every=ENDLESS)
    events = again.events()
    assert until(events, WorkerReady).step == written.step
    again.send(LeaveNow())
    ended(again, events)


def test_stop_finishes_the_step_and_writes_a_checkpoint(kind: Kind, tmp_path: Path) -> None:
    worker, events = training(kind, tmp_path)
    worker.send(StopAfterStep())
    last = ended(worker, events)[-1]
    assert isinstance(last, CheckpointWritten)
    again = kind.start(tmp_path, checkpoint_every=ENDLESS)
    events = again.events()
    assert until(events, WorkerReady).step == last.step
    again.send(LeaveNow())
    ended(again, events)


def test_lines_that_are_no_commands_are_skipped(kind: Kind, tmp_path: Path) -> None:
    worker, events = training(kind, tmp_path)
    worker.channel._socket.sendall(b'\n{}\n[1]\n\xff\xfe\n{"v": 9, "cmd": "leave"}\n{"v": 1, "cmd": "dance"}\n')
    until(events, StepDone)
    worker.send(LeaveNow())
    ended(worker, events)


def test_a_bundle_that_is_none_can_never_run(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"PK nothing")
    worker = replace(kind, bundle=tmp_path / "bad").start(tmp_path / "state")
    *_, failed = worker.events()
    assert worker.process.wait(PATIENCE_S) == ExitCode.IMPOSSIBLE
    assert isinstance(failed, TrainingFailed) and failed.cause is FailureCause.IMPOSSIBLE and failed.message
