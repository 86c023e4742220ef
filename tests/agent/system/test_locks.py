"""Locks of an instance, held by a process that is killed."""

import multiprocessing
from pathlib import Path

import pytest

from port_agent.system.locks import InstanceError, LockFile, lock_instance
from tests.waiting import PATIENCE_S


def _hold_lock(path: str, ready: "multiprocessing.synchronize.Event", end: "multiprocessing.synchronize.Event") -> None:
    lock = LockFile(Path(path))
    assert lock.try_lock()
    lock.write("4711")
    ready.set()
    end.wait()


@pytest.mark.process
def test_locks_die_with_their_holder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    holder = context.Process(target=_hold_lock, args=(str(tmp_path / "port-agent.lock"), ready, end))
    holder.start()
    assert ready.wait(PATIENCE_S)
    with pytest.raises(InstanceError, match="process 4711"):
        lock_instance(tmp_path, tmp_path / "state")
    holder.kill()
    holder.join()
    locks = lock_instance(tmp_path, tmp_path / "state")
    assert len(locks) == 1  # the state directory does not exist: nothing to protect
    for lock in locks:
        lock.close()
