"""Files of a job that move: which they are, and what a disk that takes no more leaves of them."""

from pathlib import Path

import pytest

from port_agent.jobs.job import Job, JobSpec
from port_agent.supervisor.migration_files import (
    MigratedFileError,
    job_sources,
    machine_kind,
    migrated_files,
)


def test_bundle_checkpoint_and_data_move_and_nothing_else(tmp_path: Path) -> None:
    for name in ("bundle.port", "state/slot.0", "job.log", "out.safetensors"):
        (tmp_path / "job" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "job" / name).write_text(name)
    (tmp_path / "data/birds").mkdir(parents=True)
    (tmp_path / "data/birds/1.npy").write_text("a bird")
    job = Job(1, JobSpec("birds", "bundle.port", data=str(tmp_path / "data")), 0.0)
    sources = job_sources(job, tmp_path / "job")
    assert list(sources) == ["bundle.port", "state/slot.0", "data/birds/1.npy"]
    assert [file.nbytes for file in migrated_files(sources)] == [11, 12, 6]


def test_too_many_files_are_told_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(2001):
        (tmp_path / "data" / str(number)).touch()
    with pytest.raises(MigratedFileError, match="has 2002 files; a job with more than 2000 cannot move"):
        job_sources(Job(1, JobSpec("birds", "bundle.port", data=str(tmp_path / "data")), 0.0), tmp_path)


def test_this_machine_is_always_of_one_kind() -> None:
    assert machine_kind() == machine_kind() and len(machine_kind()) == 64
