"""A worker that is told its work once it has loaded torch: the same as one that was started with it,
or gone where none comes.
"""

import subprocess
from pathlib import Path

import pytest

from port_agent.worker.protocol import LeaveNow, TakeWork, TrainingFinished
from port_agent.worker.start import Worker, start_worker, torch_worker
from port_agent.worker.worker_options import LOADED_WORKER, TorchOptions
from port_planner.base.errors import ExitCode
from tests.agent.jobs_small import small_bundle
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process


def work(folder: Path) -> TorchOptions:
    return TorchOptions(bundle=small_bundle(), state_dir=folder, steps=3, digest=True)


def result(worker: Worker) -> str | None:
    """Return the checksum of what was trained, once the worker has ended."""
    finished = [event for event in worker.events() if isinstance(event, TrainingFinished)]
    return finished[0].digest if finished else None


def loaded() -> Worker:
    return start_worker(LOADED_WORKER, limit_bytes=1 << 30, stderr=subprocess.DEVNULL)


def test_it_trains_what_it_is_told_as_a_worker_that_knew_it_before(tmp_path: Path) -> None:
    worker = loaded()
    worker.send(TakeWork(words=tuple(work(tmp_path / "told").words())))
    expected = result(start_worker(torch_worker(work(tmp_path / "known")), limit_bytes=1 << 30))
    assert expected is not None and result(worker) == expected
    assert worker.process.returncode == ExitCode.DONE


def test_without_work_it_leaves_when_told_to_or_when_nobody_is_there_any_more() -> None:
    options, alone = loaded(), loaded()
    options.send(LeaveNow())
    alone.channel.close()
    assert [worker.process.wait(PATIENCE_S) for worker in (options, alone)] == [ExitCode.LEFT, ExitCode.LEFT]


def test_words_that_say_no_work_end_it() -> None:
    worker = loaded()
    worker.send(TakeWork(words=("--bundle", "job.port")))
    assert result(worker) is None and worker.process.returncode == ExitCode.IMPOSSIBLE
