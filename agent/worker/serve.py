"""The frame of every worker process: its line to the supervisor, its signals, and how it says why it ended."""

import errno
import os
import signal
import sys
from collections.abc import Callable

from agent.worker.channel import Channel
from agent.worker.control import Control, LeftOnRequest, Tell
from agent.worker.protocol import Event, FailureCause, TrainingFailed
from planner.ir.errors import ExitCode, PortError

Work = Callable[[Control, Tell], None]
"""Trains until it is done; raises LeftOnRequest when it left as asked, and any error it cannot go on with."""

_TORCH_OUT_OF_MEMORY = "can't allocate memory"
"""From c10's CPU allocator, which raises a plain RuntimeError."""
_NO_MEMORY_FOR_A_THREAD = "can't start new thread"


def serve(control_fd: int | None, work: Work, *, leave_patience_s: float | None = None) -> ExitCode:
    """Run the work of a worker under its supervisor's control; return the exit code of the process.

    Without a line to a supervisor events go nowhere, and an error to standard error.
    """
    channel = Channel(control_fd) if control_fd is not None else None

    def tell(event: Event) -> None:
        if channel is not None:
            channel.send(event)

    control = Control(tell, abandon=lambda: os._exit(ExitCode.LEFT), leave_patience_s=leave_patience_s)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the front end decides
    signal.signal(signal.SIGTERM, lambda *_: control.leave())
    if channel is not None:
        channel.listen(control.handle, control.leave)
    try:
        work(control, tell)
    except LeftOnRequest:
        return ExitCode.LEFT
    except (PortError, OSError, RuntimeError, MemoryError) as error:
        return _failed(error, tell if channel is not None else None)
    return ExitCode.DONE


def failure_cause(error: Exception) -> FailureCause:
    """Return what an error means for the job it ended."""
    if isinstance(error, PortError):
        return FailureCause.IMPOSSIBLE if error.exit_code == ExitCode.IMPOSSIBLE else FailureCause.OTHER
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return FailureCause.OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and any(
        words in str(error) for words in (_TORCH_OUT_OF_MEMORY, _NO_MEMORY_FOR_A_THREAD)
    ):
        return FailureCause.OUT_OF_MEMORY
    return FailureCause.OTHER


def _failed(error: Exception, tell: Tell | None) -> ExitCode:
    cause = failure_cause(error)
    if tell is None:
        sys.stderr.write(f"port-agent worker: {error}\n")
    else:
        tell(TrainingFailed(code=type(error).__name__, message=str(error) or "out of memory", cause=cause))
    return ExitCode.IMPOSSIBLE if cause is FailureCause.IMPOSSIBLE else ExitCode.FAILED
