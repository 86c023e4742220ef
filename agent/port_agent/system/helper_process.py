"""Helper processes that do one thing for their starter, and their communication: a JSON object per line, both ways.

Messages are msgspec structs. Either a process gets one request and its output is the answer (`run_helper`,
`ask_helper`), or requests and events are exchanged (`Helper`, `AsyncHelper`). An unexpected end raises HelperError with
the last line of standard error.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from port_agent.system.python_process import NEUTRAL_DIRECTORY, module_command, module_environment
from port_planner.base.errors import PortError

LINE_LIMIT_BYTES = 1 << 20
"""Longest line of the protocol; no event is longer."""
_ERRORS_READ_BYTES = 4096
_PIPES: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)

T = TypeVar("T")


class HelperError(PortError):
    """A helper process failed or took too long. Its text completes a sentence that names the process's task."""

    def __init__(self, code: int | None, errors: bytes, text: str = "") -> None:
        """`errors`: the process's standard error. `text`: a message that replaces both."""
        self.code, self.last_line = code, errors.decode(errors="replace").strip().rpartition("\n")[2]
        super().__init__(text or f"ended with exit code {code}: {self.last_line}")


@dataclass(frozen=True, slots=True)
class HelperCommand:
    """A module to run, with its arguments and environment, in a directory (None: the working directory).

    `data_bytes`: limit of its data (RLIMIT_DATA), which also gives it the lowest priority; None: no limit.
    """

    module: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=module_environment)
    data_bytes: int | None = None
    directory: Path | None = NEUTRAL_DIRECTORY

    @property
    def words(self) -> tuple[str, ...]:
        """The command line."""
        words = (*module_command(self.module), *self.arguments)
        if self.data_bytes is None:
            return words
        limits = ("--data-limit", str(self.data_bytes), "--")
        return (*module_command("port_agent.system.exec_with_limits"), *limits, *words)

    def start(self, **streams: Any) -> "subprocess.Popen[bytes]":
        """Start it and return the process. Streams and descriptors are those of `subprocess.Popen`. Raises OSError."""
        return subprocess.Popen(self.words, env=self.environment, cwd=self.directory, **streams)

    async def start_async(self) -> asyncio.subprocess.Process:
        """Start it with all its streams in pipes, and return the process. Raises OSError."""
        return await asyncio.create_subprocess_exec(
            *self.words, env=self.environment, cwd=self.directory, limit=LINE_LIMIT_BYTES, **_PIPES
        )


def run_helper(
    command: HelperCommand, content: bytes = b"", *, within_s: float | None = None, inherited: tuple[int, ...] = ()
) -> bytes:
    """Send `content` to a process and return its answer.

    The process inherits the descriptors `inherited`. Raises HelperError, OSError.
    """
    with command.start(pass_fds=inherited, **_PIPES) as process:
        try:
            output, errors = process.communicate(content, within_s)
        except subprocess.TimeoutExpired as error:
            raise HelperError(None, b"", f"did not finish within {within_s:.0f} s") from error
        finally:
            process.kill()
    if process.returncode:
        raise HelperError(process.returncode, errors)
    return output


async def ask_helper(command: HelperCommand, content: bytes = b"", *, within_s: float | None = None) -> bytes:
    """Run a helper process from an event loop; if the task is cancelled, the process is ended.

    Raises HelperError, OSError.
    """
    process = await command.start_async()
    try:
        async with asyncio.timeout(within_s):
            output, errors = await process.communicate(content)
    except TimeoutError:
        raise HelperError(None, b"", f"did not finish within {within_s:.0f} s") from None
    finally:
        _kill(process)
        await process.wait()
    if process.returncode:
        raise HelperError(process.returncode, errors)
    return output


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


class Helper(Generic[T]):
    """A process that takes requests and answers each with events, one after another."""

    def __init__(self, command: HelperCommand, events: "msgspec.json.Decoder[T]") -> None:
        """Start it; raises OSError."""
        import tempfile  # not for the supervisor, which has none of these

        self._events = events
        with contextlib.ExitStack() as opened:
            self._errors = opened.enter_context(tempfile.TemporaryFile())
            self.process = command.start(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)
            self._opened = opened.pop_all()

    def ask(self, request: msgspec.Struct) -> Iterator[T]:
        """Send a request and yield events until the process ends; the caller stops after the
        last one for the request.
        """
        if self.process.stdin is None or self.process.stdout is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(request) + b"\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                yield self._events.decode(line)

    def close(self) -> HelperError:
        """End it and return its exit status."""
        with self._opened:
            with contextlib.suppress(BrokenPipeError):  # a request that it did not read
                self.process.communicate()
            self._errors.seek(0)
            return HelperError(self.process.returncode, self._errors.read())


class AsyncHelper(Generic[T]):
    """A process that takes requests and sends events at any time, for an event loop."""

    def __init__(self, process: asyncio.subprocess.Process, events: "msgspec.json.Decoder[T]") -> None:
        self._process, self._events = process, events
        self._errors = asyncio.create_task(_tail(process.stderr))

    @property
    def runs(self) -> bool:
        """Whether it is still running."""
        return self._process.returncode is None

    def send(self, request: msgspec.Struct) -> None:
        """Send a request; a process that has ended does not read it."""
        if self._process.stdin is not None:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")

    async def event(self) -> T | None:
        """Return the next event; None at the end, or for an invalid line."""
        if self._process.stdout is not None:
            with contextlib.suppress(ValueError, msgspec.MsgspecError):
                return self._events.decode(await self._process.stdout.readline())
        return None

    def kill(self) -> None:
        """Kill it without waiting for its end."""
        _kill(self._process)

    async def close(self) -> HelperError:
        """End it, unless it has closed its output and is ending by itself. Return its exit status."""
        if self._process.stdout is None or not self._process.stdout.at_eof():
            self.kill()
        await self._process.wait()
        return HelperError(self._process.returncode, await self._errors)


async def start_helper(
    command: HelperCommand, events: "msgspec.json.Decoder[T]", request: msgspec.Struct
) -> AsyncHelper[T]:
    """Start a process, send its first request, and return it. Raises OSError."""
    helper = AsyncHelper(await command.start_async(), events)
    helper.send(request)
    return helper


async def _tail(stream: asyncio.StreamReader | None) -> bytes:
    """Return the end of a stream's content."""
    held = b""
    while stream is not None and (chunk := await stream.read(_ERRORS_READ_BYTES)):
        held = (held + chunk)[-_ERRORS_READ_BYTES:]
    return held


def requests(kind: "msgspec.json.Decoder[T]") -> Iterator[T]:
    """Yield the requests on standard input until it ends; for use in a helper process."""
    return map(kind.decode, sys.stdin)


def send_event(event: msgspec.Struct) -> None:
    """Send an event to the process that started this one."""
    sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
    sys.stdout.flush()


def helper_exit_code(work: Callable[[], object]) -> int:
    """Return 0 once `work` is done; 1 if it raised PortError or OSError, whose text goes to standard error."""
    try:
        work()
    except (PortError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
