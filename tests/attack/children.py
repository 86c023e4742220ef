"""Runs what may end its process in a child, and hears how far that came."""

import os
from collections.abc import Callable


def lines_of_child(run: Callable[[int], None]) -> tuple[list[str], int]:
    """Return the lines that `run` wrote to the descriptor it is given, in a forked child, and the child's exit code."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read_fd)
            run(write_fd)
        finally:
            os._exit(1)
    os.close(write_fd)
    with open(read_fd, "rb") as stream:
        made = stream.read().decode().splitlines()
    return made, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
