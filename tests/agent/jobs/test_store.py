"""Rules of jobs, and a store that loses none."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.jobs import store as store_module
from port_agent.jobs.job import (
    JobKind,
    JobRequestError,
    JobSpec,
    JobState,
    to_record,
)
from port_agent.jobs.store import JobStore, StoreError

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


def test_of_an_attached_program_nothing_is_stored_but_that_its_number_is_taken(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job = store.add_attached(JobSpec(name="train", bundle=None, kind=JobKind.ATTACHED), 1.0, known_as=5)
    assert job.id == 1  # 5 was never given
    store.save(replace(job, state=JobState.PAUSED))
    store.keep_in_memory(replace(job, step=3))
    store.note(2.0, job.id, "started", "it runs")
    assert store.find("train").step == 3
    assert store.history() == [] and not store.job_dir(job.id).exists()
    store.close()
    again = JobStore(tmp_path)
    assert again.all() == [] and again.set_aside == {}
    assert again.add(SPEC, 3.0).id == 2
    assert again.add_attached(job.spec, 4.0, known_as=1).id == 1
    assert again.add_attached(replace(job.spec, name="other"), 4.0, known_as=2).id == 3
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


@pytest.mark.parametrize("writer", ["_write_row", "_take_number"])
def test_damage_that_shows_when_a_job_is_added_loses_neither_it_nor_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    store = JobStore(tmp_path)
    first = store.add(SPEC, 1.0)
    write, damaged = getattr(store_module, writer), [True]

    def writes(*arguments: object) -> None:
        if damaged.pop() if damaged else False:
            raise sqlite3.DatabaseError("database disk image is malformed")
        write(*arguments)

    monkeypatch.setattr(store_module, writer, writes)
    spec = replace(SPEC, name="next")
    added = store.add(spec, 2.0) if writer == "_write_row" else store.add_attached(spec, 2.0, None)
    assert added.id == 2 and store.recovered_from is not None and store.trouble is None
    store.close()
    again = JobStore(tmp_path)
    assert again.get(first.id) == first and again.add(replace(SPEC, name="third"), 3.0).id == 3
    assert (writer == "_write_row") == (added.id in {job.id for job in again.all()})
    again.close()


def test_a_damaged_manifest_without_a_row_is_set_aside(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    first = store.add(SPEC, 1.0)
    store.close()
    (tmp_path / "jobs/9").mkdir()
    (tmp_path / "jobs/9/manifest.json").write_text('{"v": 1, "id": 9, "sp')
    (tmp_path / "jobs.db").unlink()
    again = JobStore(tmp_path)
    assert again.all() == [first] and list(again.set_aside) == [9]
    again.close()


def edit_row(state_dir: Path, job_id: int, record: str) -> None:
    """Put another record into the row of a job."""
    connection = sqlite3.connect(state_dir / "jobs.db")
    with connection:
        connection.execute("UPDATE jobs SET record = ? WHERE id = ?", (record, job_id))
    connection.close()


def test_a_damaged_row_is_replaced_by_the_manifest(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    jobs = [store.add(replace(SPEC, name=f"job{n}"), float(n)) for n in range(3)]
    store.note(5.0, 1, "kept", "what happened before")
    store.close()
    edit_row(tmp_path, 2, '{"v": 1, "id": 2, "spec": {"na')
    again = JobStore(tmp_path)
    assert again.all() == jobs and again.recovered_from is not None and not again.set_aside
    assert [entry.text for entry in again.history()] == ["what happened before"]
    again.close()
    assert JobStore(tmp_path).recovered_from is None


def test_a_job_without_a_sound_record_is_set_aside_and_the_rest_runs(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    jobs = [store.add(replace(SPEC, name=f"job{n}"), float(n)) for n in range(3)]
    store.close()
    edit_row(tmp_path, 2, "{}")
    (tmp_path / "jobs/2/manifest.json").write_text("{}")
    (tmp_path / "jobs/2/weights").write_text("expensive")
    for _ in range(2):
        again = JobStore(tmp_path)
        assert again.all() == [jobs[0], jobs[2]]
        assert "damaged" in again.set_aside[2].reason
        with pytest.raises(JobRequestError, match=r"set aside .* cancel 2"):
            again.get(2)
        assert (tmp_path / "jobs/2/weights").read_text() == "expensive"
        again.close()
    again = JobStore(tmp_path)
    assert again.add(replace(SPEC, name="next"), 9.0).id == 4
    again.forget(2)
    assert again.flush() and not (tmp_path / "jobs/2").exists()
    again.close()
    assert not JobStore(tmp_path).set_aside


def test_a_job_of_a_later_agent_waits_for_its_return(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    first, second = (store.add(replace(SPEC, name=name), 1.0) for name in ("one", "two"))
    store.close()
    later = {**to_record(second), "v": 2, "tensor_cores": True}
    edit_row(tmp_path, 2, json.dumps(later))
    (tmp_path / "jobs/2/manifest.json").write_text(json.dumps(later))
    again = JobStore(tmp_path)
    assert again.all() == [first] and "version 2" in again.set_aside[2].reason and again.set_aside[2].name == "two"
    assert again.recovered_from is None
    again.close()
    edit_row(tmp_path, 2, json.dumps(to_record(second)))
    (tmp_path / "jobs/2/manifest.json").write_text(json.dumps(to_record(second)))
    assert JobStore(tmp_path).all() == [first, second]


def test_a_newer_manifest_counts_when_the_cut_came_between_the_two_writes(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    first = store.add(SPEC, 1.0)
    store.flush()
    shutil.copytree(tmp_path, tmp_path / "cut")
    store.save(replace(first, state=JobState.CANCELLED))
    store.close()
    shutil.copytree(tmp_path / "jobs", tmp_path / "cut/jobs", dirs_exist_ok=True)
    again = JobStore(tmp_path / "cut")
    assert again.get(first.id).state is JobState.CANCELLED
    again.close()


def test_a_forgotten_job_stays_forgotten_when_the_cut_comes_before_its_files_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore(tmp_path)
    first = store.add(SPEC, 1.0)
    (tmp_path / "jobs/1/weights").write_text("many")
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
    store.forget(first.id)
    assert store.flush()
    store.close()
    monkeypatch.undo()
    again = JobStore(tmp_path)
    assert again.all() == [] and list((tmp_path / "jobs").iterdir()) == []
    again.close()


def test_what_a_cut_left_of_a_job_that_was_never_accepted_goes(tmp_path: Path) -> None:
    store = JobStore(tmp_path)

    def cut(directory: Path) -> None:
        (directory / "bundle.port").write_text("large")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.add(SPEC, 1.0, cut)
    store.close()
    again = JobStore(tmp_path)
    assert again.all() == [] and list((tmp_path / "jobs").iterdir()) == []
    again.close()


def test_a_damaged_setting_is_not_believed(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    store.add(SPEC, 1.0)
    store.remember("paused", "1790000000.0")
    store.close()
    connection = sqlite3.connect(tmp_path / "jobs.db")
    with connection:
        connection.execute("UPDATE settings SET value = '1190000000.0' WHERE key = 'paused'")
    connection.close()
    again = JobStore(tmp_path)
    assert again.setting("paused") is None and again.recovered_from is not None
    again.close()


FULL_DISK = """
import sys
from pathlib import Path
from dataclasses import replace
from port_agent.jobs.job import JobSpec, JobState
from port_agent.jobs.store import JobStore, StoreError
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
from port_agent.jobs.job import JobSpec
from port_agent.jobs.store import JobStore, StoreError
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


def test_a_cut_before_the_row_of_a_forgotten_job_is_gone(tmp_path: Path) -> None:
    """The start finishes what was begun."""
    store = JobStore(tmp_path)
    kept, gone = store.add(SPEC, 1.0), store.add(replace(SPEC, name="gone"), 2.0)
    store.close()
    store.job_dir(gone.id).rename(tmp_path / "jobs" / f".{gone.id}.gone")
    store = JobStore(tmp_path)
    assert store.all() == [kept] and not store.set_aside
    store.close()
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == [str(kept.id)]
    with sqlite3.connect(tmp_path / "jobs.db") as rows:
        assert rows.execute("SELECT id FROM jobs").fetchall() == [(kept.id,)]


def test_a_job_without_its_directory_is_set_aside_and_the_others_are_written(tmp_path: Path) -> None:
    """What a full disk may leave of a job that it refused: the row came through, and its removal did not."""
    store = JobStore(tmp_path)
    first, second = store.add(SPEC, 1.0), store.add(replace(SPEC, name="refused"), 2.0)
    store.close()
    shutil.rmtree(store.job_dir(second.id))
    store = JobStore(tmp_path)
    assert store.all() == [first] and "its directory is missing" in store.set_aside[second.id].reason
    store.save(replace(first, step=3))
    assert store.flush() and store.trouble is None
    assert store.add(replace(SPEC, name="next"), 3.0).id == second.id + 1
    store.forget(second.id)
    assert store.flush()
    store.close()
    assert not JobStore(tmp_path).set_aside
