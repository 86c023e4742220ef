"""Rules of jobs, and a store that loses none."""

import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent.jobs.model import (
    JobRequestError,
    JobSpec,
    JobState,
)
from agent.jobs.store import JobStore, StoreError

SPEC = JobSpec(name="birds", bundle="bundle.port", epochs=3)


# --- the store


def test_jobs_survive_a_restart(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    first = store.add(SPEC, 10.0)
    second = store.add(replace(SPEC, name="fish"), 11.0)
    store.save(replace(first, state=JobState.FINISHED, step=9))
    store.note(12.0, first.id, "finished", "all done")
    store.remember("paused", "1")
    store.add_wear("2026-06-03", 1000)
    store.add_wear("2026-06-03", 500)
    store.close()
    again = JobStore(tmp_path)
    assert [item.id for item in again.all()] == [first.id, second.id]
    assert again.find("birds").step == 9
    assert again.find(str(second.id)).spec.name == "fish"
    assert [entry.text for entry in again.history(first.id)] == ["all done"]
    assert again.setting("paused") == "1"
    assert again.written_on("2026-06-03") == 1500
    assert again.trouble is None
    again.close()


def test_an_id_is_never_used_twice(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    first = store.add(SPEC, 1.0)
    store.forget(first.id)
    store.close()
    again = JobStore(tmp_path)
    assert again.add(SPEC, 2.0).id == first.id + 1
    again.close()


def test_names_of_living_jobs_are_unique(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    first = store.add(SPEC, 1.0)
    with pytest.raises(JobRequestError, match="choose another"):
        store.add(SPEC, 2.0)
    store.save(replace(first, state=JobState.CANCELLED))
    assert store.add(SPEC, 3.0).id == store.find("birds").id
    with pytest.raises(JobRequestError, match="no job"):
        store.find("nobody")
    store.close()


@pytest.mark.parametrize("damage", ["zeros", "text", "middle"])
def test_a_damaged_database_is_moved_aside_and_rebuilt(tmp_path: Path, damage: str) -> None:
    store = JobStore(tmp_path)
    jobs = [store.add(replace(SPEC, name=f"job{n}"), float(n)) for n in range(40)]
    store.save(replace(jobs[3], state=JobState.PAUSED, step=7))
    store.close()
    path = tmp_path / "jobs.db"
    content = bytearray(path.read_bytes())
    if damage == "zeros":
        content[:4096] = bytes(4096)
    elif damage == "text":
        content = bytearray(b"this is no database, it is a text file " * 1000)
    else:
        content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    again = JobStore(tmp_path)
    assert again.recovered_from is not None and again.recovered_from.exists()
    assert [item.id for item in again.all()] == [item.id for item in jobs]
    assert again.get(jobs[3].id).step == 7
    assert again.add(replace(SPEC, name="next"), 99.0).id == jobs[-1].id + 1
    again.close()
    assert len(JobStore(tmp_path).all()) == 41


def test_damage_while_running_is_rebuilt_from_memory(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    first = store.add(SPEC, 1.0)
    error = sqlite3.DatabaseError("database disk image is malformed")
    with store._database_errors():
        raise error
    assert store.recovered_from is not None
    assert store.get(first.id) == first
    store.close()
    assert JobStore(tmp_path).get(first.id) == first


def test_a_torn_manifest_of_an_unacknowledged_job_is_ignored(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    first = store.add(SPEC, 1.0)
    store.close()
    (tmp_path / "jobs/9").mkdir()
    (tmp_path / "jobs/9/manifest.json").write_text('{"v": 1, "id": 9, "sp')
    (tmp_path / "jobs.db").unlink()
    again = JobStore(tmp_path)
    assert again.all() == [first]
    again.close()


FULL_DISK = """
import sys
from pathlib import Path
from dataclasses import replace
from agent.jobs.model import JobSpec, JobState
from agent.jobs.store import JobStore, StoreError
root = Path(sys.argv[1])
store = JobStore(root)
first = store.add(JobSpec(name="one", bundle="b"), 1.0)
filler = (root / "filler").open("wb", buffering=0)
try:
    while True: filler.write(bytes(4096))
except OSError:
    pass
store.save(replace(first, step=5, state=JobState.PAUSED))
assert not store.flush()
assert store.trouble is not None, "a full disk must show"
try:
    store.add(JobSpec(name="two", bundle="b"), 2.0)
    raise SystemExit("a job was accepted that cannot be kept")
except StoreError as error:
    assert "free space" in str(error)
filler.close(); (root / "filler").unlink()
assert store.flush() and store.trouble is None
second = store.add(JobSpec(name="two", bundle="b"), 2.0)
store.close()
again = JobStore(root)
assert [(job.spec.name, job.step) for job in again.all()] == [("one", 5), ("two", 0)]
print("ok")
"""

READ_ONLY = """
import subprocess, sys
from pathlib import Path
from dataclasses import replace
from agent.jobs.model import JobSpec
from agent.jobs.store import JobStore, StoreError
root = Path(sys.argv[1])
store = JobStore(root)
first = store.add(JobSpec(name="one", bundle="b"), 1.0)
store.close()
subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
store = JobStore(root)
assert store.trouble is not None, "a read-only directory must show"
assert store.all() == [first], "jobs stay visible"
store.save(replace(first, step=3))
assert not store.flush()
try:
    store.add(JobSpec(name="two", bundle="b"), 2.0)
    raise SystemExit("a job was accepted that cannot be kept")
except StoreError:
    pass
subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
assert store.flush() and store.trouble is None, store.trouble
store.close()
assert JobStore(root).get(1).step == 3
print("ok")
"""


@pytest.mark.root
@pytest.mark.parametrize("script", [FULL_DISK, READ_ONLY])
def test_a_disk_that_takes_nothing(tmp_path: Path, script: str) -> None:
    """On a real small file system of its own, in a mount namespace of its own."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("needs root on Linux for a mount namespace")
    shell = f'mount -t tmpfs -o size=1M none {tmp_path} && exec {sys.executable} -c "$1" {tmp_path}'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", shell, "sh", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr


def test_adding_to_a_store_that_cannot_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").mkdir()
    store = JobStore(tmp_path)
    assert store.trouble is not None
    with pytest.raises(StoreError, match="cannot be written"):
        store.add(SPEC, 1.0)
