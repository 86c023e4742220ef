"""A fine-tuning's worker process: it pauses, leaves and is killed at random instants, and ends with the
bits of a run left alone.
"""

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.finetuning.job.finetune_worker import DaemonSteering
from port_agent.finetuning.job_file import FinetuneJob
from port_agent.finetuning.steering import TrainingExit
from port_agent.worker.control import Control
from port_agent.worker.protocol import (
    CheckpointWritten,
    Event,
    LeaveNow,
    PauseTraining,
    ResumeTraining,
    StepDone,
    TrainingFailed,
    TrainingFinished,
    WorkerPaused,
    WorkerReady,
    WorkerResumed,
    WriteCheckpoint,
)
from port_agent.worker.start import Worker, start_worker
from port_agent.worker.worker_options import FINETUNE_WORKER, WorkerOptions
from port_planner.base.errors import ExitCode
from tests.agent.finetuning.left_alone import WEIGHTS, adapter_left_alone
from tests.agent.finetuning.tiny_model import make_data, make_model
from tests.waiting import used_ticks, wait_until_drawn_moment

MIB = 1 << 20
RAM = 700 * MIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("job")
    make_model(made / "model", hidden_size=128)
    make_data(made / "data.jsonl")
    return made


def options_of(folder: Path, out: Path, updates: int) -> FinetuneOptions:
    return FinetuneOptions(
        str(folder / "model"),
        (str(folder / "data.jsonl"),),
        str(out),
        sequence_tokens=32,
        updates=updates,
        learning_rate=0.01,
    )


def job_of(folder: Path, out: Path, updates: int) -> Path:
    """Write a job's file and return it."""
    job = FinetuneJob.of(options_of(folder, out, updates), ram_bytes=RAM, threads=1, page_dir=out.parent)
    path = out.parent / "bundle.port"
    path.write_bytes(job.encoded())
    return path


@contextmanager
def worker_of(job: Path) -> Iterator[tuple[Worker, Iterator[Event]]]:
    options = WorkerOptions(bundle=job, state_dir=job.parent / "state")
    with (job.parent / "worker.err").open("a") as said:
        worker = start_worker([*FINETUNE_WORKER, *options.words()], limit_bytes=RAM, threads=2, stderr=said.fileno())
        try:
            yield worker, worker.events()
        finally:
            worker.process.kill()
            worker.process.wait()
            worker.channel.close()


def until(events: Iterator[Event], kind: type[Event]) -> tuple[Event, list[Event]]:
    """Return the first event of a kind, and those before it."""
    before: list[Event] = []
    for event in events:
        if isinstance(event, kind):
            return event, before
        before.append(event)
    raise AssertionError(f"no {kind.__name__} after {before[-3:]}")


@pytest.mark.long
def test_paused_left_and_killed_it_ends_with_the_bits_of_a_run_left_alone(folder: Path, tmp_path: Path) -> None:
    updates, job = 60, job_of(folder, tmp_path / "out", 60)
    with worker_of(job) as (worker, events):
        ready, _ = until(events, WorkerReady)
        assert isinstance(ready, WorkerReady) and (ready.step, ready.total_steps) == (0, updates)
        step, _ = until(events, StepDone)
        assert isinstance(step, StepDone) and step.loss is not None and step.cpu_s > 0 and step.total_steps == updates
        worker.send(PauseTraining())
        paused, _ = until(events, WorkerPaused)
        assert used_ticks(worker.process.pid) == 0
        worker.send(ResumeTraining())
        assert until(events, WorkerResumed)[1] == [] and isinstance(paused, WorkerPaused)
        worker.send(WriteCheckpoint())
        written, _ = until(events, CheckpointWritten)
        assert isinstance(written, CheckpointWritten) and written.step >= paused.step and written.bytes > 1000
        until(events, StepDone)
        worker.send(LeaveNow(within_s=10.0))
        rest = list(events)
        assert worker.process.wait() == ExitCode.LEFT
        kept = rest[-1]
        assert isinstance(kept, CheckpointWritten)
        done = [event.step for event in rest if isinstance(event, StepDone)]
        assert not done or kept.step >= done[-1]
    with worker_of(job) as (worker, events):
        ready, _ = until(events, WorkerReady)
        assert isinstance(ready, WorkerReady) and ready.step == kept.step
        for _ in range(2):
            until(events, StepDone)
        worker.process.kill()  # what came after the checkpoint is trained again
    with worker_of(job) as (worker, events):
        ready, _ = until(events, WorkerReady)
        assert isinstance(ready, WorkerReady) and ready.step == kept.step
        finished, before = until(events, TrainingFinished)
        steps = [event.step for event in before if isinstance(event, StepDone)]
        assert steps == list(range(kept.step + 1, updates + 1))
        assert (
            isinstance(finished, TrainingFinished)
            and finished.step == updates
            and finished.out == str(tmp_path / "out")
        )
        assert worker.process.wait() == ExitCode.DONE
    alone = adapter_left_alone(options_of(folder, tmp_path / "plain", updates))
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == alone
    assert not (tmp_path / "out.state").exists()
    assert (tmp_path / "worker.err").read_text().count("port-agent: peak") == 2  # not of the one that was killed


@pytest.mark.long
def test_left_at_random_instants_it_ends_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    updates, job, numbers = 80, job_of(folder, tmp_path / "out", 80), random.Random(5)
    steps, runs = 0, 0
    while True:
        runs += 1
        with worker_of(job) as (worker, events):
            ready, _ = until(events, WorkerReady)
            assert isinstance(ready, WorkerReady) and ready.step >= steps
            wait_until_drawn_moment(numbers, 0.4)
            if runs % 5 == 0:
                worker.process.kill()
                worker.process.wait()
                if steps and not (tmp_path / "out.state").exists():  # it had just finished
                    break
                continue
            worker.send(LeaveNow(within_s=10.0))
            rest = list(events)
            code = worker.process.wait()
            steps = max([steps, *(event.step for event in rest if isinstance(event, StepDone))])
            if code == ExitCode.DONE:
                break
            assert code == ExitCode.LEFT, (tmp_path / "worker.err").read_text()[-2000:]
    assert runs > 4
    alone = adapter_left_alone(options_of(folder, tmp_path / "plain", updates))
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == alone


@pytest.fixture
def steered() -> Iterator[tuple[DaemonSteering, Control, list[Event]]]:
    """A steering whose main thread is this, and what it tells."""
    before, options = signal.getsignal(signal.SIGUSR1), list[Event]()
    control = Control(options.append, abandon=lambda: None)
    steering = DaemonSteering(control, options.append)
    control.attach(steering)
    yield steering, control, options
    signal.signal(signal.SIGUSR1, before)


def test_results_whose_writing_has_begun_are_written_whole(
    steered: tuple[DaemonSteering, Control, list[Event]],
) -> None:
    steering, control, options = steered
    steering.finish()
    control.leave()
    steering.finished(3, "adapter")
    assert isinstance(options[-1], TrainingFinished) and (options[-1].step, options[-1].out) == (3, "adapter")


def test_who_is_to_leave_before_leaves(steered: tuple[DaemonSteering, Control, list[Event]]) -> None:
    _, control, _ = steered
    with pytest.raises(TrainingExit):
        control.leave()


@pytest.mark.process
def test_files_that_changed_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes((folder / "data.jsonl").read_bytes())
    options = replace(options_of(folder, tmp_path / "out", 3), data=(str(tmp_path / "data.jsonl"),))
    job = tmp_path / "bundle.port"
    job.write_bytes(FinetuneJob.of(options, ram_bytes=RAM, threads=1, page_dir=tmp_path).encoded())
    (tmp_path / "data.jsonl").write_text('{"text": "others"}\n')
    with worker_of(job) as (worker, events):
        failed, before = until(events, TrainingFailed)
        assert isinstance(failed, TrainingFailed) and before == []
        assert failed.message == (
            f"{tmp_path / 'data.jsonl'} has changed since the job was submitted; restore it, or submit the fine-tuning "
            "again"
        )
        assert worker.process.wait() == ExitCode.IMPOSSIBLE
