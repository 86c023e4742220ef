"""The directories of jobs: made whole or not at all, taken away by one rename, read back by their manifests."""

from pathlib import Path

import pytest

from port_agent.jobs.directories import JobDirectories
from port_agent.jobs.job import Job, JobSpec
from port_agent.jobs.records import seal


def manifest(number: int, written: int = 1) -> str:
    return seal(Job(id=number, spec=JobSpec(name=f"job-{number}", bundle="b.port"), submitted_at=0.0), written)


def test_a_new_job_has_its_files_and_its_manifest(tmp_path: Path) -> None:
    directories = JobDirectories(tmp_path / "jobs")
    directories.create(3, manifest(3), lambda folder: (folder / "b.port").touch())
    sound, damaged = directories.manifests()
    assert sorted(path.name for path in directories.of(3).iterdir()) == ["b.port", "manifest.json"]
    assert (list(sound), sound[3].name, damaged, directories.numbers()) == ([3], "job-3", {}, [3])


def test_a_job_whose_files_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "b.port").touch()
        raise OSError(28, "No space left on device")

    directories = JobDirectories(tmp_path / "jobs")
    with pytest.raises(OSError, match="No space"):
        directories.create(3, manifest(3), full)
    assert not list((tmp_path / "jobs").iterdir())


def test_a_job_that_was_taken_away_is_gone_for_a_start_though_its_space_is_not_free(tmp_path: Path) -> None:
    directories = JobDirectories(tmp_path)
    directories.create(3, manifest(3), lambda folder: None)
    directories.take_away(3)
    directories.take_away(4)  # there was none
    assert directories.numbers() == [] and directories.manifests() == ({}, {}) and list(tmp_path.iterdir())
    directories.remove_remains(but=set())
    assert not list(tmp_path.iterdir())


def test_a_manifest_in_the_wrong_place_and_a_torn_one_are_named(tmp_path: Path) -> None:
    directories = JobDirectories(tmp_path)
    for number in (1, 2, 3):
        directories.create(number, manifest(number), lambda folder: None)
    directories.write_manifest(2, manifest(1))
    directories.write_manifest(3, manifest(3)[:-9])
    (tmp_path / "lost+found").mkdir()
    sound, damaged = directories.manifests()
    assert list(sound) == [1] and damaged[2] == "its manifest belongs to job 1" and "damaged" in damaged[3]
