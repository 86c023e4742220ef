"""The errors of the whole project: one root, three parts in each message.

Every message says what happened, with which numbers, and what to do about it.
Closed outcomes of planning (optimal, feasible, infeasible, timed out) are results, not exceptions.
"""


class PortError(Exception):
    """Root of every error this project raises on purpose; the command line prints it without a traceback."""

    exit_code = 1


class CaptureError(PortError):
    """A step that cannot be recorded faithfully."""

    exit_code = 2
