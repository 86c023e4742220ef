"""Become a worker: set the limits first, then exec the worker's command.

This is a separate process instead of code between fork and exec: the limits hold before the worker's first allocation,
and nothing runs in a half-copied interpreter. Uses the standard library only.
"""

import argparse
import ctypes
import os
import platform
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "armv7l": 314, "riscv64": 30}
"""System call numbers of ioprio_set by machine."""
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_IDLE = 3 << 13
_OOM_SCORE_ADJ = 800
"""OOM score that makes the kernel kill the worker before any of the user's processes when the
machine runs out of memory.
"""


def main(argv: Sequence[str]) -> int:
    """Apply the limits and exec; returns only when the command cannot be run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cgroup", type=Path)
    parser.add_argument("--data-limit", type=int, help="RLIMIT_DATA in bytes")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if arguments.cgroup is not None:
        (arguments.cgroup / "cgroup.procs").write_text(str(os.getpid()))
    if arguments.data_limit is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = arguments.data_limit if hard == resource.RLIM_INFINITY else min(arguments.data_limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump of 400 MB on an SD card helps nobody
    lower_priority()
    os.execvp(command[0], command)


def lower_priority() -> None:
    """Give everything else on the machine priority; settings that the system rejects stay unchanged."""
    try:
        os.nice(10)
    except OSError as error:
        _warn("nice", error)
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None and libc.syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE) != 0:
        _warn("ioprio", OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))
    try:
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJ))
    except OSError as error:
        _warn("oom_score_adj", error)


def _warn(what: str, error: OSError) -> None:
    sys.stderr.write(f"port-agent: {what} stays as it is: {error}\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
