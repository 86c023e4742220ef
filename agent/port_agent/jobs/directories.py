"""The directory of each job: its files, and the manifest from which a broken database is rebuilt."""

import contextlib
import shutil
from collections.abc import Callable, Set
from pathlib import Path

from port_agent.jobs.records import DamagedRecordError, StoredRecord, unseal
from port_agent.system.atomic_file import sync_directory, write_atomically

_MANIFEST = "manifest.json"
_BUILDING, _REMAINS = ".{}.new", ".{}.gone"
"""Directories of a job that is not accepted yet, and of one that is being deleted; a start removes both."""


class JobDirectories:
    """The directories of all jobs below `root`, each named by the job's number. Every method touches the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def of(self, job_id: int) -> Path:
        """Return the directory of a job."""
        return self.root / str(job_id)

    def create(self, job_id: int, manifest: str, prepare: Callable[[Path], None]) -> None:
        """Make the directory of a new job, whole or not at all: `prepare` puts its files there. Raises OSError."""
        building = self.root / _BUILDING.format(job_id)
        try:
            building.mkdir(parents=True, exist_ok=True)
            prepare(building)
            write_atomically(building / _MANIFEST, manifest.encode())
            building.rename(self.of(job_id))
            sync_directory(self.root)
        except OSError:
            shutil.rmtree(building, ignore_errors=True)
            self.discard(job_id)
            raise

    def discard(self, job_id: int) -> None:
        """Remove the directory of a job that was not accepted after all."""
        shutil.rmtree(self.of(job_id), ignore_errors=True)

    def write_manifest(self, job_id: int, manifest: str) -> None:
        """Write the record of a job next to its files. Raises OSError."""
        write_atomically(self.of(job_id) / _MANIFEST, manifest.encode())

    def take_away(self, job_id: int) -> None:
        """Remove a job so that no start finds it again; `remove_taken` then frees the space. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self.of(job_id).rename(self.root / _REMAINS.format(job_id))
            sync_directory(self.root)

    def remove_taken(self, job_id: int) -> None:
        """Remove the files of a job that was removed."""
        shutil.rmtree(self.root / _REMAINS.format(job_id), ignore_errors=True)

    def taken_away(self, job_id: int) -> bool:
        """Return whether a job was removed while its files remain."""
        return (self.root / _REMAINS.format(job_id)).is_dir()

    def remove_remains(self, but: Set[int]) -> None:
        """Remove files left by an interruption, of jobs that were being deleted or never acknowledged, except those in
        `but`.
        """
        kept = {self.root / _REMAINS.format(job_id) for job_id in but}
        for path in {*self.root.glob(_REMAINS.format("*")), *self.root.glob(_BUILDING.format("*"))} - kept:
            shutil.rmtree(path, ignore_errors=True)

    def numbers(self) -> list[int]:
        """Return the numbers of all jobs that have a directory."""
        return [int(path.name) for path in self.root.glob("*") if _is_number(path.name)]

    def manifests(self) -> tuple[dict[int, StoredRecord], dict[int, str]]:
        """Return the intact manifests by job id, and what is wrong with the others."""
        sound, damaged = {}, {}
        for path in sorted(self.root.glob(f"*/{_MANIFEST}")):
            if not _is_number(path.parent.name):
                continue
            number = int(path.parent.name)
            try:
                record = unseal(path.read_bytes())
                if record.id != number:
                    raise DamagedRecordError(f"its manifest belongs to job {record.id}")
                sound[number] = record
            except (OSError, DamagedRecordError) as error:
                damaged[number] = str(error)
        return sound, damaged


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()
