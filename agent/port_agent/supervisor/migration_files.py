"""The files that move with a job, and the kind of this machine: a run's bits depend on the kind."""

import hashlib
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from port_agent.jobs.job import Job
from port_agent.peers.migration_requests import MAX_FILES, MigratedFile
from port_agent.peers.transfer import sha256_of
from port_agent.supervisor.job.worker_kinds import bundle_path
from port_agent.supervisor.service import BUNDLE_NAME
from port_planner.base.errors import PortError

STATE, DATA, RESULT = "state", "data", "out.safetensors"
"""Names in a job's directory: checkpoints, samples that came with it, and trained weights."""
_CPU_LINES = ("model name", "CPU part", "CPU implementer", "flags", "Features")


class MigratedFileError(PortError):
    """The files cannot move."""


def job_sources(job: Job, job_dir: Path) -> dict[str, Path]:
    """Return the files that move with a job: their place there, and the file here.

    Raises MigratedFileError, OSError.
    """
    bundle = bundle_path(job, job_dir)
    if bundle is None:
        raise MigratedFileError(f"job {job.label} has no bundle")
    data = {} if job.spec.data is None else tree(job_dir / job.spec.data, DATA)
    found = {BUNDLE_NAME: bundle, **tree(job_dir / STATE, STATE), **data}
    if len(found) > MAX_FILES:
        raise MigratedFileError(f"job {job.label} has {len(found)} files; a job with more than {MAX_FILES} cannot move")
    return found


def tree(folder: Path, name: str) -> dict[str, Path]:
    """Return the files below a directory by their relative path under `name`; none if the directory does not exist."""
    return {
        f"{name}/{path.relative_to(folder).as_posix()}": path for path in sorted(folder.rglob("*")) if path.is_file()
    }


def total_bytes(sources: dict[str, Path]) -> int:
    """Return the size of files; raises OSError."""
    return sum(path.stat().st_size for path in sources.values())


def migrated_files(sources: dict[str, Path], hash_of: Callable[[Path], str] = sha256_of) -> tuple[MigratedFile, ...]:
    """Return files in the form in which they are announced, read at the medium's speed; raises OSError."""
    return tuple(MigratedFile(name, path.stat().st_size, hash_of(path)) for name, path in sources.items())


def free_bytes(folder: Path) -> int:
    """Return the space available to the agent on the disk of a directory; raises OSError."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def machine_kind() -> str:
    """Return a hash of what the bits of a step depend on besides the bundle: processor and torch."""
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
