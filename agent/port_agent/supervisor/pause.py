"""The user's pause of everything, a span of time in a separate file.

The file outlives the job database, and a pause survives changes of the clock. While the machine runs or sleeps,
the pause is counted on the clock that never jumps. Across a restart of the machine, it is counted by the date, if
that is set and advances.
"""

import contextlib
import math
from pathlib import Path

import msgspec

from port_agent.jobs.store import StoreError
from port_agent.system.atomic_file import sync_directory, write_atomically
from port_agent.system.clock import CLOCK_SET_AFTER_S, Clock

FILE_NAME = "pause.json"
BY_USER = "paused by you"
LOST = "paused because the job database was lost, and with it any pause of yours"
UNREADABLE = "paused because the file of your pause cannot be read"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Record(msgspec.Struct, frozen=True):
    """A pause at one moment. `left_s`: seconds left, None for no end. `boot`: the boot in which `uptime_s` counts."""

    left_s: float | None
    reason: str
    boot: str
    uptime_s: float
    wall_s: float


class Pause:
    """Whether everything is paused, for how long and why.

    A pause holds even while the disk rejects it; `flush` tries again.
    """

    def __init__(self, state_dir: Path, clock: Clock, boot_id: Path = _BOOT_ID) -> None:
        self._path, self._clock, self.pending = state_dir / FILE_NAME, clock, False
        self._boot = ""
        with contextlib.suppress(OSError):  # not Linux: as if the machine had been started again
            self._boot = boot_id.read_text().strip()
        self._record = self._load()

    def begin(self, for_s: float | None, reason: str = BY_USER) -> None:
        """Pause for a span in seconds, None for no end."""
        self._record, self.pending = self._now(for_s, reason), True

    def end(self) -> None:
        """End the pause."""
        self._record, self.pending = None, True

    def left_s(self) -> float | None:
        """Return for how many seconds everything is still paused: infinity for no end, None for no pause."""
        if self._record is None:
            return None
        if self._record.left_s is None:
            return math.inf
        left_s = self._record.left_s - (self._clock.uptime_s() - self._record.uptime_s)
        return left_s if left_s > 0 else None

    def until(self) -> float | None:
        """Return the end in Unix time by the current clock: infinity for no end, None for no pause."""
        left_s = self.left_s()
        return None if left_s is None else self._clock.wall_s() + left_s

    @property
    def reason(self) -> str:
        """Why everything is paused; empty for no pause."""
        return "" if self._record is None else self._record.reason

    def flush(self) -> None:
        """Write what is not on disk yet; raises `StoreError`, after which the next call tries again."""
        if not self.pending:
            return
        record, self.pending = self._record, False
        try:
            if record is None:
                self._path.unlink(missing_ok=True)
                sync_directory(self._path.parent)
            else:
                write_atomically(self._path, msgspec.json.encode(record))
        except OSError as error:
            self.pending = True
            raise StoreError(self._path, error.strerror or str(error)) from error

    def _now(self, left_s: float | None, reason: str) -> _Record:
        return _Record(left_s, reason, self._boot, self._clock.uptime_s(), self._clock.wall_s())

    def _load(self) -> _Record | None:
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=_Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError):
            return self._now(None, UNREADABLE)
        if record.left_s is None or (record.boot == self._boot and self._boot):
            return record
        self.pending = True
        passed_s = self._clock.wall_s() - record.wall_s if record.wall_s >= CLOCK_SET_AFTER_S else 0.0
        return self._now(record.left_s - max(0.0, passed_s), record.reason)
