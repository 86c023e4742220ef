"""Incoming data: files are added to `inbox/<job>/`, and each round of the job trains on the new ones."""

import contextlib
import errno
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE, S_IRWXG, S_ISVTX

import msgspec

from port_agent.system.atomic_file import sync_directory, write_atomically
from port_agent.system.directory_handle import DirectoryHandle

_UNFINISHED = (".part", ".tmp", ".crdownload", "~")
_CONSUMED = "consumed.json"
_SEAL = ""
"""Key that no file can have. Its entry holds the checksum of the others, and agents that do not seal ignore it."""
_DAMAGED = "{} is damaged: the record of trained data is lost, and that data is trained on again"

Stamp = tuple[int, int]
"""Size in bytes and modification time in nanoseconds: a file that changes counts as new."""


@dataclass(frozen=True, slots=True)
class InboxState:
    """The new files of one job; `error` if its inbox cannot be read."""

    new: tuple[str, ...] = ()
    error: str = ""
    forgotten: str = ""
    """Why files of earlier rounds are new again."""


class Inboxes:
    """The inboxes of all jobs. A file counts once two scans saw it unchanged, which means that copying has ended."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._seen: dict[str, dict[str, Stamp]] = {}
        self._new: dict[str, InboxState] = {}
        self._forgotten: dict[str, str] = {}
        """Reason why files of the last round are new again, for each job."""

    def scan(self, name: str, job_dir: Path) -> InboxState:
        """Scan the inbox of job `name` and return what is new and complete."""
        try:
            found = self._arrived(name)
        except OSError as error:
            state = InboxState(error=f"{self.root / name}: {error.strerror}")
            self._new[name] = state
            return state
        before, (consumed, damage) = self._seen.get(name, {}), _read_stamps(job_dir / _CONSUMED)
        stable = (file for file, stamp in found.items() if before.get(file) == stamp)
        new = tuple(sorted(file for file in stable if consumed.get(file) != found[file]))
        state = InboxState(new, forgotten=damage or self._forgotten.get(name, ""))
        self._seen[name], self._new[name] = found, state
        return state

    def _arrived(self, name: str) -> dict[str, Stamp]:
        """Return the files in an inbox that are not being written; links are ignored. Raises OSError."""
        try:
            with self.open(name) as inbox:
                found = {file: _stamp(status) for file, status in inbox.files() if status.st_size > 0}
        except FileNotFoundError:
            return {}
        return {
            file: stamp for file, stamp in found.items() if not file.startswith(".") and not file.endswith(_UNFINISHED)
        }

    def state(self, name: str) -> InboxState:
        """Return the result of the last scan."""
        return self._new.get(name, InboxState())

    def create(self, name: str) -> None:
        """Create the inbox of a new job, writable for the agent's group whatever the umask.

        Each member can remove only its own files.

        Raises OSError.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with DirectoryHandle.open(self.root) as root, root.below(name, make=True) as inbox:
            mode = S_IMODE(os.fstat(inbox.descriptor).st_mode)
            with contextlib.suppress(PermissionError):  # another user's directory keeps its permissions
                os.fchmod(inbox.descriptor, mode | S_IRWXG | S_ISVTX)

    def open(self, name: str) -> DirectoryHandle:
        """Return a handle of a job's inbox. Raises OSError, also if it was replaced by a link."""
        with DirectoryHandle.open(self.root) as root:
            return root.below(name)

    def forget(self, name: str) -> None:
        """Forget a job that has ended; its files belong to the user and stay."""
        self._seen.pop(name, None)
        self._new.pop(name, None)

    def has_round(self, name: str, job_dir: Path, number: int) -> bool:
        """Return whether round `number` has begun or could begin now."""
        return (job_dir / "rounds" / str(number)).is_dir() or bool(self.state(name).new)

    def round_directory(self, name: str, job_dir: Path, number: int) -> Path:
        """Return the directory with the data of round `number`, created from new files if it does not exist yet.

        Its files are links, so it takes no space, and it does not change when the round is resumed.
        Sizes and modification times are recorded next to it, so that later additions do not become part
        of this round. Raises OSError.
        """
        target = job_dir / "rounds" / str(number)
        if target.is_dir():
            return target
        building = target.with_name(f".{number}.new")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        seen = self._seen.get(name, {})
        with self.open(name) as inbox, DirectoryHandle.open(building) as taken:
            for file in self.state(name).new:
                _take(inbox, file, taken)
        _write_stamps(_taken(job_dir, number), {file: seen[file] for file in self.state(name).new})
        building.rename(target)
        sync_directory(target.parent)
        self._new[name] = InboxState()
        return target

    def drop_round(self, job_dir: Path, number: int) -> None:
        """Delete a round that failed for good, so that the next try uses the current inbox."""
        shutil.rmtree(job_dir / "rounds" / str(number), ignore_errors=True)
        _taken(job_dir, number).unlink(missing_ok=True)

    def finish_round(self, name: str, job_dir: Path, number: int) -> None:
        """Record the files of a finished round, as it used them, as consumed. Raises OSError.

        If that record is damaged, the files count as new again, and the next scans report it.
        """
        directory = job_dir / "rounds" / str(number)
        if not directory.is_dir():
            return
        taken = _taken(job_dir, number)
        stamps, damage = _read_stamps(taken)
        consumed, damage_before = _read_stamps(job_dir / _CONSUMED)
        _write_stamps(job_dir / _CONSUMED, {**consumed, **stamps})
        self._forgotten[name] = damage or damage_before
        self._new[name] = InboxState()  # scans during the round still counted its files as new
        shutil.rmtree(directory, ignore_errors=True)
        taken.unlink(missing_ok=True)


def _taken(job_dir: Path, number: int) -> Path:
    return job_dir / "rounds" / f"{number}.json"


def _write_stamps(path: Path, stamps: Mapping[str, Stamp]) -> None:
    sealed = {**stamps, _SEAL: (_checksum(stamps), 0)}
    write_atomically(path, msgspec.json.encode(sealed, order="sorted"))


def _read_stamps(path: Path) -> tuple[dict[str, Stamp], str]:
    """Return the recorded files, and what is wrong with the record.

    A damaged record is empty, so a round repeats data.
    """
    try:
        stamps = msgspec.json.decode(path.read_bytes(), type=dict[str, Stamp])
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, RecursionError):
        return {}, _DAMAGED.format(path)
    seal = stamps.pop(_SEAL, None)
    if seal is not None and seal != (_checksum(stamps), 0):
        return {}, _DAMAGED.format(path)
    return stamps, ""


def _checksum(stamps: Mapping[str, Stamp]) -> int:
    return zlib.crc32(msgspec.json.encode(stamps, order="sorted"))


def _take(inbox: DirectoryHandle, file: str, taken: DirectoryHandle) -> None:
    try:
        inbox.link(file, taken)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EXDEV):
            raise
        # a file of another user (protected_hardlinks), or on another file system
        os.symlink(inbox.path / file, file, dir_fd=taken.descriptor)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns
