"""The files of a job that move with it, and what kind of machine this is: a run has the bits of one kind."""

import hashlib
import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from port_agent.jobs.model import Job
from port_agent.peers.moving.requests import MOST_FILES, MovedFile
from port_agent.supervisor.job.worker_kinds import bundle_path
from port_agent.supervisor.service import BUNDLE_NAME
from port_planner.base.errors import PortError

STATE, DATA, RESULT = "state", "data", "out.safetensors"
"""In a job's directory: checkpoints, samples that came with it, trained weights."""
_CPU_LINES = ("model name", "CPU part", "CPU implementer", "flags", "Features")


class MovedFileError(PortError):
    """Files that cannot move."""


def job_sources(job: Job, job_dir: Path) -> dict[str, Path]:
    """Return what moves with a job: its place there, and the file here; raises MovedFileError, OSError."""
    bundle = bundle_path(job, job_dir)
    if bundle is None:
        raise MovedFileError(f"job {job.label} has no bundle")
    data = {} if job.spec.data is None else tree(job_dir / job.spec.data, DATA)
    found = {BUNDLE_NAME: bundle, **tree(job_dir / STATE, STATE), **data}
    if len(found) > MOST_FILES:
        raise MovedFileError(f"job {job.label} has {len(found)} files; a job moves with {MOST_FILES} at most")
    return found


def tree(folder: Path, name: str) -> dict[str, Path]:
    """Return the files below a folder by their path as it is below `name`; none where there is no such folder."""
    return {
        f"{name}/{path.relative_to(folder).as_posix()}": path for path in sorted(folder.rglob("*")) if path.is_file()
    }


def total_bytes(sources: dict[str, Path]) -> int:
    """Return the size of files; raises OSError."""
    return sum(path.stat().st_size for path in sources.values())


def moved_files(sources: dict[str, Path]) -> tuple[MovedFile, ...]:
    """Return files as they are announced, read at the medium's speed; raises OSError."""
    return tuple(MovedFile(name, path.stat().st_size, sha256(path)) for name, path in sources.items())


def sha256(file: Path) -> str:
    """Return the hash of a file; raises OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_part(file: Path, offset: int, nbytes: int) -> bytes:
    """Return some bytes of a file; raises OSError."""
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(nbytes)


def append(file: Path, data: bytes) -> None:
    """Add to the end of a file; raises OSError, and then the file has none of it."""
    before, rest = file_bytes(file), memoryview(data)
    with file.open("ab", buffering=0) as stream:
        try:
            while rest:
                rest = rest[stream.write(rest) or 0 :]
        except OSError:
            stream.truncate(before)
            raise


def sync(files: Iterable[Path]) -> None:
    """Have files on the disk; raises OSError."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_bytes(file: Path) -> int:
    """Return how much of a file is there."""
    return file.stat().st_size if file.exists() else 0


def free_bytes(folder: Path) -> int:
    """Return how much room the agent has on the disk of a folder; raises OSError."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def machine_kind() -> str:
    """Return a hash of what the bits of a step depend on beside the bundle: processor and torch."""
    words = [platform.system(), platform.machine()]
    try:
        words.append(version("torch"))
    except PackageNotFoundError:
        words.append("no torch")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        words += sorted({line for line in lines if line.startswith(_CPU_LINES)})
    except OSError:
        words.append(platform.processor())
    return hashlib.sha256("\n".join(words).encode()).hexdigest()
