"""Read power from the output of the system's own tools.

The output is the answer of a short command, or the newest record of a command that keeps running.
"""

import os
import re
import subprocess
from collections.abc import Callable, Sequence

from port_agent.energy.sources.power_source import (
    GpuReading,
    SelfTest,
    SensorReading,
    SourceError,
    SourceInfo,
    plausible_watts,
    probe_by_reading,
)

_COMMAND_TIMEOUT_S = 2.0
"""Seconds that a command may take; the supervisor waits for it, and such commands take about 10 ms."""
_MAX_PENDING_BYTES = 1 << 20
"""Largest unfinished record in bytes.

A record is a few kB; a tool that never ends one is broken and must not fill the supervisor's memory.
"""


def command_output(source: str, command: Sequence[str], remedy: str) -> str:
    """Return the output of `command`; raise `SourceError` if it is missing, fails or takes over two seconds."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceError(source, f"cannot run {command[0]} ({error})", remedy) from error
    if done.returncode:
        output = done.stderr.decode(errors="replace").strip()[-200:]
        raise SourceError(source, f"{' '.join(command)} ended with {done.returncode}: {output}", remedy)
    return done.stdout.decode(errors="replace")


class ToolSource:
    """A source that reads power from the output of a tool."""

    def __init__(
        self,
        info: SourceInfo,
        text: Callable[[float], str | None],
        watts: Callable[[str], float | None],
        close: Callable[[], None] = lambda: None,
        gpu: Callable[[str], GpuReading | None] = lambda text: None,
    ) -> None:
        """`gpu` reads the GPU's part. `text` returns the tool's output at a given time, and
        None before the first record.

        `watts` parses it, and returns None if there is nothing to measure.
        """
        self.info = info
        self._text = text
        self._watts = watts
        self._close = close
        self._gpu = gpu

    def read(self, now_s: float) -> SensorReading | None:
        """Return the power now; raise `SourceError` if the tool failed or its output is truncated or garbled."""
        text = self._text(now_s)
        watts = None if text is None else self._watts(text)
        if text is None or watts is None:
            return None
        return SensorReading(now_s, watts=plausible_watts(self.info.name, watts), gpu=self._gpu(text))

    def self_test(self, now_s: float) -> SelfTest:
        """Return whether the tool runs and its output is understood."""
        return probe_by_reading(self, now_s)

    def close(self) -> None:
        """Stop the tool, if it keeps running."""
        self._close()


class ChildOutput:
    """A tool that prints one record after another, read without ever waiting for it."""

    def __init__(self, source: str, command: Sequence[str], record_end: str, stale_after_s: float) -> None:
        """`record_end` is a regular expression that matches the end of a record, including its newline."""
        self._source = source
        self._command = tuple(command)
        self._end = re.compile(record_end.encode())
        self._stale_after_s = stale_after_s
        self._child: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._newest: str | None = None
        self._newest_s = 0.0

    def newest(self, now_s: float) -> str | None:
        """Return the newest whole record; None before the first.

        Starts the tool if it does not run. Raises `SourceError` if it has died, is missing, or has been silent for
        longer than `stale_after_s`.
        """
        child = self._child or self._start(now_s)
        self._take(child, now_s)
        if child.poll() is not None:
            self.close()
            raise self._error(f"ended with code {child.returncode}")
        if now_s - self._newest_s > self._stale_after_s:
            self.close()
            raise self._error(f"silent for {now_s - self._newest_s:.0f} s")
        return self._newest

    def fileno(self) -> int:
        """Return the pipe's descriptor for waiting; -1 while the tool does not run."""
        return self._child.stdout.fileno() if self._child and self._child.stdout else -1

    def _start(self, now_s: float) -> "subprocess.Popen[bytes]":
        try:
            child = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise self._error(f"cannot be started ({error})") from error
        if child.stdout is not None:
            os.set_blocking(child.stdout.fileno(), False)
        self._child, self._newest_s = child, now_s
        return child

    def _take(self, child: "subprocess.Popen[bytes]", now_s: float) -> None:
        """Move the tool's new output into `_newest` and `_pending`."""
        if child.stdout is None:
            return
        while True:
            try:
                chunk = os.read(child.stdout.fileno(), 65536)
            except BlockingIOError:
                break
            if not chunk:
                break
            self._pending += chunk
        ends = [match.end() for match in self._end.finditer(self._pending)]
        if ends:
            start = ends[-2] if len(ends) > 1 else 0
            self._newest = self._pending[start : ends[-1]].decode(errors="replace")
            self._newest_s = now_s
            self._pending = self._pending[ends[-1] :]
        if len(self._pending) > _MAX_PENDING_BYTES:
            self.close()
            raise self._error(f"printed {_MAX_PENDING_BYTES >> 20} MiB without ending a record")

    def _error(self, problem: str) -> SourceError:
        return SourceError(
            self._source, f"{self._command[0]} {problem}", f"run `{' '.join(self._command)}` manually to see why"
        )

    def close(self) -> None:
        """Stop the tool and discard its output."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            if self._child.stdout is not None:
                self._child.stdout.close()
        self._child, self._pending, self._newest = None, b"", None
