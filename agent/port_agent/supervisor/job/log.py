"""The log of one job: the worker's output and the supervisor's actions, with a size cap."""

import os
from datetime import datetime
from pathlib import Path

FILE_NAME = "job.log"


class JobLog:
    """Appends lines to `job.log`; at half the cap, that file becomes `job.log.1` and a new one begins.

    There is no fsync: a lost line does not matter, but wear does.
    """

    def __init__(self, directory: Path, cap_bytes: int) -> None:
        self.path = directory / FILE_NAME
        self._half = max(4096, cap_bytes // 2)
        self._partial = b""

    def note(self, text: str, wall_s: float) -> None:
        """Add a line of the supervisor."""
        stamp = datetime.fromtimestamp(wall_s).strftime("%Y-%m-%d %H:%M:%S")
        self._append(f"{stamp} agent: {text}\n".encode())

    def output(self, data: bytes, wall_s: float) -> None:
        """Add the worker's output, line by line."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > 8192:
            lines, self._partial = [*lines, self._partial], b""
        stamp = datetime.fromtimestamp(wall_s).strftime("%Y-%m-%d %H:%M:%S").encode()
        if lines:
            self._append(b"".join(stamp + b" worker: " + line + b"\n" for line in lines))

    def close(self, wall_s: float) -> None:
        """Write a last line that has no line end."""
        if self._partial:
            self.output(b"\n", wall_s)

    def _append(self, data: bytes) -> None:
        """Write as much as the disk accepts; a full disk has its own health item."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            os.write(descriptor, data)
            if os.fstat(descriptor).st_size > self._half:
                self.path.rename(self.path.with_name(f"{FILE_NAME}.1"))
        except OSError:
            return
        finally:
            os.close(descriptor)


def read_log(directory: Path, lines: int) -> tuple[str, int]:
    """Return the last lines of a job's log, and the position after them for `read_more`."""
    older = _content(directory / f"{FILE_NAME}.1")
    newest = _content(directory / FILE_NAME)
    text = (older + newest).decode("utf-8", "replace")
    return "".join(text.splitlines(keepends=True)[-lines:] if lines else []), len(newest)


def read_more(directory: Path, position: int) -> tuple[str, int]:
    """Return what was added since `position`, and the new position.

    After a rotation, reading starts at the beginning.
    """
    path = directory / FILE_NAME
    try:
        size = path.stat().st_size
    except OSError:
        return "", 0
    if size == position:
        return "", position
    content = _content(path)
    return content[position if size > position else 0 :].decode("utf-8", "replace"), len(content)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
