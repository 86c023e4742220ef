"""There are never two workers: the one of a killed supervisor is waited for, and killed only if it is one of ours."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from port_agent.supervisor import old_worker
from port_agent.supervisor.old_worker import clear_old_worker
from port_agent.system.locks import LockFile
from tests.waiting import PATIENCE_S

SLEEPER = "import sys; print('ready', flush=True); sys.stdin.read()"


@contextmanager
def holder(lock_path: Path, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process that inherited the lock and is noted in it, as a worker is."""
    lock = LockFile(lock_path)
    assert lock.try_lock()
    words = (sys.executable, "-c", SLEEPER, *words)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[lock.descriptor]) as process:
        lock.write(str(process.pid))
        lock.close()
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


def clear(lock_path: Path) -> None:
    asyncio.run(asyncio.wait_for(clear_old_worker(lambda: LockFile(lock_path)), 60.0))


def is_free(lock_path: Path) -> bool:
    lock = LockFile(lock_path)
    try:
        return lock.try_lock()
    finally:
        lock.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_worker, "PATIENCE_S", 0.05)


def test_nobody_there_is_no_wait(tmp_path: Path) -> None:
    clear(tmp_path / "worker.lock")
    assert is_free(tmp_path / "worker.lock")


def test_a_directory_that_takes_no_lock_has_no_worker(tmp_path: Path) -> None:
    clear(tmp_path / "nowhere/worker.lock")


@pytest.mark.process
def test_a_worker_that_leaves_by_itself_is_not_killed(tmp_path: Path) -> None:
    async def meet(process: "subprocess.Popen[bytes]") -> None:
        asked = asyncio.Event()

        def open_lock() -> LockFile:
            asked.set()
            return LockFile(tmp_path / "worker.lock")

        waiting = asyncio.create_task(clear_old_worker(open_lock))
        await asked.wait()
        assert process.stdin is not None and not waiting.done()
        process.stdin.close()
        await asyncio.wait_for(waiting, 60.0)

    with holder(tmp_path / "worker.lock", "--control-fd", "9") as process:
        asyncio.run(meet(process))
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.process
@pytest.mark.usefixtures("impatient")
def test_a_worker_that_stays_is_killed(tmp_path: Path) -> None:
    with holder(tmp_path / "worker.lock", "--control-fd", "9") as process:
        clear(tmp_path / "worker.lock")
        assert is_free(tmp_path / "worker.lock")
        assert process.wait(PATIENCE_S) == -9


@pytest.mark.process
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("noted", ["own", "", "0", "-1", "not a valid number", str(2**31 - 2)])
def test_a_process_that_is_none_of_ours_is_left_alone(tmp_path: Path, noted: str) -> None:
    """The process id was given to another program since, or the note was never written."""
    path = tmp_path / "worker.lock"
    with holder(path, "--something-else") as process:
        if noted != "own":
            path.write_text(noted)
        clear(path)
        assert process.poll() is None and not is_free(path)


def test_the_lock_of_the_wait_is_let_go_of(tmp_path: Path) -> None:
    opened: list[LockFile] = []

    def open_lock() -> LockFile:
        opened.append(LockFile(tmp_path / "worker.lock"))
        return opened[0]

    asyncio.run(clear_old_worker(open_lock))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0].descriptor)
