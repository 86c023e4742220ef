"""The errors of the whole project: one root, three parts in each message.

Every message says what happened, with which numbers, and what to do about it.
Closed outcomes of planning (optimal, feasible, infeasible, timed out) are results, not exceptions.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the processes of this project end with: commands, the daemon and workers.

    The numbers never change.
    """

    DONE = 0
    FAILED = 1
    IMPOSSIBLE = 2
    """As asked it can never work: a wrong argument, a broken bundle, a budget below the possible."""
    UNREACHABLE = 3
    """No daemon answers."""
    DIVERGED = 4
    """The loss or the state became NaN or infinite; the last good checkpoint is kept."""
    LEFT = 75
    """EX_TEMPFAIL: a worker left on request and can be resumed; the place is taken by another daemon."""
    CONFIG = 78
    """EX_CONFIG: the configuration cannot be read."""
    INTERRUPTED = 130
    """Ctrl-C, as shells count it."""


class PortError(Exception):
    """Root of every error this project raises on purpose.

    The command line prints it without a traceback.
    """

    exit_code: int = ExitCode.FAILED


class CaptureError(PortError):
    """A step that cannot be recorded faithfully."""

    exit_code = ExitCode.IMPOSSIBLE
