"""The frame of every worker process: its connection to the supervisor, signals, and why it ended."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from port_agent.system.passing_errors import is_passing
from port_agent.worker.channel import Channel
from port_agent.worker.control import Control, Emit, LeftOnRequest
from port_agent.worker.protocol import Event, FailureCause, TrainingFailed
from port_planner.base.errors import ExitCode, PortError

Work = Callable[[Control, Emit], None]
"""Function that trains until it is done; raises LeftOnRequest if it left on request, and any fatal error."""

_CAUSES: Mapping[int, FailureCause] = {
    ExitCode.IMPOSSIBLE: FailureCause.IMPOSSIBLE,
    ExitCode.DIVERGED: FailureCause.DIVERGED,
}
"""Meaning for the job of an error's exit code."""

_OUT_OF_MEMORY = (
    "can't allocate memory",  # c10's CPU allocator
    "can't start new thread",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "NVML_SUCCESS == r",  # of CUDA's allocator on a Jetson, which asserts if it cannot determine the reason (pytorch#185240)
)
"""Words of plain RuntimeErrors that mean lack of memory."""
_DEVICE_FULL = "OutOfMemoryError"
"""Name of an exception of torch, which is not imported here."""


def serve(control_fd: int | None, work: Work, *, leave_patience_s: float | None = None) -> ExitCode:
    """Run the work of a worker under its supervisor's control; return the exit code of the process.

    Without a connection to a supervisor, events are dropped, and an error goes to standard error.
    """
    channel = Channel(control_fd) if control_fd is not None else None

    def emit(event: Event) -> None:
        if channel is not None:
            channel.send(event)

    control = Control(emit, abandon=lambda: os._exit(ExitCode.LEFT), leave_patience_s=leave_patience_s)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the front end decides
    signal.signal(signal.SIGTERM, lambda *_: control.leave())
    if channel is not None:
        channel.listen(control.handle, control.leave)
    try:
        work(control, emit)
    except LeftOnRequest:
        return ExitCode.LEFT
    except Exception as error:  # whatever ends the work is reported in one line
        return _failed(error, emit if channel is not None else None)
    return ExitCode.DONE


def failure_cause(error: Exception) -> FailureCause:
    """Return the meaning of an error for the job that it ended."""
    if is_passing(error):
        return FailureCause.OTHER
    if isinstance(error, PortError):
        return _CAUSES.get(error.exit_code, FailureCause.OTHER)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return FailureCause.OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and (
        type(error).__name__ == _DEVICE_FULL or any(words in str(error) for words in _OUT_OF_MEMORY)
    ):
        return FailureCause.OUT_OF_MEMORY
    return FailureCause.OTHER


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, PortError | RuntimeError | MemoryError):
        return str(error) or "out of memory"
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in place)
    return f"{type(error).__name__}: {error}{where}; plan the job again, and report this if it persists"


def _failed(error: Exception, emit: Emit | None) -> ExitCode:
    cause = failure_cause(error)
    if emit is None:
        sys.stderr.write(f"port-agent worker: {_sentence(error)}\n")
    else:
        emit(TrainingFailed(code=type(error).__name__, message=_sentence(error), cause=cause))
    return next((ExitCode(code) for code, meant in _CAUSES.items() if meant is cause), ExitCode.FAILED)
