"""Whether the threads of a bundle's operators fit into memory here."""

import mmap
import os
import resource
import sys

from port_planner.base.errors import ExitCode, PortError

_DEFAULT_STACK_BYTES = 8 << 20
"""Stack in bytes of a thread, if the process's own stack has no limit."""
_MAP_NORESERVE = 0x4000
"""Linux's constant, which Python names from 3.13 on.

Only the process's limit counts such memory, which is never touched.
"""


class ThreadLimitError(PortError):
    """There are more threads than memory allows."""

    exit_code = ExitCode.IMPOSSIBLE


def usable_core_numbers() -> frozenset[int] | None:
    """Return the numbers of the cores on which this process may run; None if the system does not report them."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def usable_cores() -> int:
    """Return on how many cores this process may run."""
    return len(usable_core_numbers() or ()) or os.cpu_count() or 1


def check_thread_limit(count: int) -> None:
    """Raise ThreadLimitError if the process's memory limit (RLIMIT_DATA, on Linux) does not allow that many threads.

    The OpenMP library would end the process if one cannot start, so memory for their stacks is briefly mapped. After an
    operator with fewer threads, the library ends the others. If there are more of them than cores, they may still exist
    when the next set starts, and both must fit.
    """
    if count == 1 or sys.platform != "linux":
        return
    cores = usable_cores()
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack_bytes = _DEFAULT_STACK_BYTES if stack == resource.RLIM_INFINITY else stack
    threads = (count - 1) * (2 if count > cores else 1)
    try:
        mmap.mmap(-1, threads * stack_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE).close()
    except OSError as error:
        raise ThreadLimitError(
            f"the bundle's {count} threads on {cores} cores do not fit into memory; plan it again with fewer "
            "`--threads`, or with more --ram"
        ) from error
