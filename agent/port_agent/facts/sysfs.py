"""Read small kernel files below an injectable root; a failed read is a fault, never a default."""

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from port_agent.facts.readings import Fault

READ_LIMIT_BYTES = 65536
"""Largest read in bytes: no sysfs attribute is larger than a page, and /proc/stat of a 256-core machine is smaller."""

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.EOPNOTSUPP, errno.ENODATA)
"""Errors that mean absent or switched off: an iwlwifi zone answers ENODATA while the radio is down."""


T = TypeVar("T")


class ReadAbandonedError(Exception):
    """A read returned after its caller had stopped waiting."""


@dataclass(slots=True)
class ReadWatch:
    """What a thread is reading now, for those who wait for it."""

    path: Path | None = None
    since_s: float = field(default_factory=time.monotonic)
    abandoned: bool = False


@dataclass(slots=True)
class Tree:
    """The kernel's file trees, with the faults met while reading them."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    faults: list[Fault] = field(default_factory=list)
    silent: set[Path] = field(default_factory=set)
    """Files that block a thread which reads them."""
    watch: ReadWatch = field(default_factory=ReadWatch)

    def ask(self, path: Path, read: Callable[[], T]) -> T:
        """Return the result of `read` for `path`.

        Raises TimeoutError for a path that already blocks a thread, `ReadAbandonedError` if nobody waits any longer,
        OSError.
        """
        watch = self.watch
        if path in self.silent:
            raise TimeoutError(errno.ETIMEDOUT, "does not answer")
        watch.path, watch.since_s = path, time.monotonic()
        try:
            return read()
        finally:
            watch.path = None
            if watch.abandoned:
                self.silent.discard(path)
                raise ReadAbandonedError

    def abandon(self, watch: ReadWatch) -> None:
        """Stop waiting for what is read under `watch`: it counts as silent until the read returns."""
        path, watch.abandoned = watch.path, True
        if path is not None:
            self.silent.add(path)

    def fault(self, sensor: str, reason: str) -> None:
        """Record that `sensor` gave no usable value."""
        self.faults.append(Fault(sensor, reason))

    def take_faults(self) -> tuple[Fault, ...]:
        """Return the faults since the last call and forget them."""
        faults, self.faults = tuple(self.faults), []
        return faults

    def text(self, path: Path, sensor: str, *, required: bool = False, absent: Sequence[int] = ()) -> str | None:
        """Return the stripped content of `path`, or None.

        A file that is not there is silently None unless `required`: kernels differ. Any other failure (permission,
        EINVAL, an input/output error) is a fault of `sensor`, except for errors that mean `absent` here.
        """

        def read() -> str:
            with path.open("rb", buffering=0) as file:
                return (file.read(READ_LIMIT_BYTES) or b"").decode("utf-8", "replace").strip()

        return self._found(path, sensor, read, () if required else (*_ABSENT, *absent))

    def stat(self, path: Path, sensor: str) -> os.stat_result | None:
        """Return the status of `path`; None if it does not exist, and also None, with a fault, if that is unknown."""
        return self._found(path, sensor, path.stat)

    def resolved(self, path: Path, sensor: str) -> Path | None:
        """Return `path` without symbolic links; None if it leads nowhere.

        A path that cannot be followed is also a fault.
        """
        return self._found(path, sensor, lambda: Path(os.path.realpath(path, strict=True)))

    def number(self, path: Path, sensor: str, *, required: bool = False, absent: Sequence[int] = ()) -> int | None:
        """Return the integer in `path`, or None; text that is not a valid number is a fault."""
        text = self.text(path, sensor, required=required, absent=absent)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            self.fault(sensor, f"{path}: expected a number, found {text[:40]!r}")
            return None

    def children(self, path: Path, sensor: str, *, required: bool = False) -> list[Path]:
        """Return the sorted entries of a directory; an absent one has none, and is a fault if it is `required`."""
        return (
            self._found(
                path, sensor, lambda: sorted(path.iterdir(), key=attrgetter("name")), () if required else _ABSENT
            )
            or []
        )

    def listed(self, path: Path, sensor: str) -> list[Path] | None:
        """Return the sorted entries of a directory, none for an absent one.

        A directory that cannot be listed gives None and a fault.
        """
        known_faults = len(self.faults)
        found = self._found(path, sensor, lambda: sorted(path.iterdir(), key=attrgetter("name")))
        return [] if found is None and len(self.faults) == known_faults else found

    def _found(self, path: Path, sensor: str, read: Callable[[], T], absent: Sequence[int] = _ABSENT) -> T | None:
        try:
            return self.ask(path, read)
        except OSError as error:
            if error.errno not in absent:
                self.fault(sensor, f"{path}: {error.strerror}")
            return None
