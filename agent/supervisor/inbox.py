"""Data that arrives: `inbox/<job>/` grows, and each round of the job trains on what is new."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from agent.system.atomic_file import sync_directory, write_atomically

_UNFINISHED = (".part", ".tmp", ".crdownload", "~")
_CONSUMED = "consumed.json"

Stamp = tuple[int, int]
"""Size in bytes and modification time in nanoseconds: a file that changes counts as new."""


@dataclass(frozen=True, slots=True)
class InboxState:
    """What is new for one job; `error` when its inbox cannot be read."""

    new: tuple[str, ...] = ()
    error: str = ""


class Inboxes:
    """The inboxes of all jobs. A file counts once it looked the same in two scans: copying has ended."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._seen: dict[str, dict[str, Stamp]] = {}
        self._new: dict[str, InboxState] = {}

    def scan(self, name: str, job_dir: Path) -> InboxState:
        """Look into the inbox of job `name` and return what is new and complete."""
        try:
            found = _files(self.root / name)
        except OSError as error:
            state = InboxState(error=f"{self.root / name}: {error.strerror}")
            self._new[name] = state
            return state
        before, consumed = self._seen.get(name, {}), read_consumed(job_dir)
        stable = (file for file, stamp in found.items() if before.get(file) == stamp)
        state = InboxState(tuple(sorted(file for file in stable if consumed.get(file) != found[file])))
        self._seen[name], self._new[name] = found, state
        return state

    def state(self, name: str) -> InboxState:
        """Return the result of the last scan."""
        return self._new.get(name, InboxState())

    def create(self, name: str) -> Path:
        """Make the inbox of a new job, open to the agent's group."""
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def forget(self, name: str) -> None:
        """Drop what is known of a job that is over; its files are the user's and stay."""
        self._seen.pop(name, None)
        self._new.pop(name, None)

    def has_round(self, name: str, job_dir: Path, number: int) -> bool:
        """Return whether round `number` is begun or could begin now."""
        return (job_dir / "rounds" / str(number)).is_dir() or bool(self.state(name).new)

    def round_directory(self, name: str, job_dir: Path, number: int) -> Path:
        """Return the directory with the data of round `number`; made from what is new if it is not there yet.

        Its files are links, so it costs no space, and it stays the same when the round is resumed.
        Raises OSError.
        """
        target = job_dir / "rounds" / str(number)
        if target.is_dir():
            return target
        building = target.with_name(f".{number}.new")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        for file in self.state(name).new:
            _link(self.root / name / file, building / file)
        building.rename(target)
        sync_directory(target.parent)
        self._new[name] = InboxState()
        return target

    def drop_round(self, job_dir: Path, number: int) -> None:
        """Take a round apart that failed for good, so that the next try sees the inbox as it is then."""
        shutil.rmtree(job_dir / "rounds" / str(number), ignore_errors=True)

    def finish_round(self, name: str, job_dir: Path, number: int) -> None:
        """Note the files of a finished round as consumed. Raises OSError."""
        directory = job_dir / "rounds" / str(number)
        if not directory.is_dir():
            return
        consumed = {key: list(stamp) for key, stamp in read_consumed(job_dir).items()}
        for file, stamp in _files(directory).items():
            consumed[file] = list(stamp)
        write_atomically(job_dir / _CONSUMED, json.dumps(consumed, sort_keys=True).encode())
        self._new[name] = InboxState()  # scans during the round still counted its files as new
        shutil.rmtree(directory, ignore_errors=True)


def read_consumed(job_dir: Path) -> dict[str, Stamp]:
    """Return the files that earlier rounds trained on."""
    try:
        content = json.loads((job_dir / _CONSUMED).read_bytes())
        return {str(file): (int(stamp[0]), int(stamp[1])) for file, stamp in content.items()}
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return {}  # nothing was consumed yet; at worst a round repeats data


def _files(directory: Path) -> dict[str, Stamp]:
    found = {}
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return {}
    for entry in entries:
        if entry.name.startswith(".") or entry.name.endswith(_UNFINISHED) or not entry.is_file():
            continue
        stat = entry.stat()
        if stat.st_size > 0:
            found[entry.name] = (stat.st_size, stat.st_mtime_ns)
    return found


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # another file system, or a file of another user (protected_hardlinks)
        target.symlink_to(source)
