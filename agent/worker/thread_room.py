"""Whether the threads of a bundle's operators can be started here."""

import os
import threading

from planner.ir.errors import PortError


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_thread_room(count: int) -> None:
    """Raise PortError where the machine, or the process's memory limit, has no room for so many threads of operators.

    The OpenMP library would end the process where one cannot start: so as many, with stacks as large, are tried. After an
    operator that takes fewer it ends the others; where they are more than the cores, they may still be there when the
    next set starts, and there must be room for both.
    """
    cores = usable_cores()
    done = threading.Event()
    started: list[threading.Thread] = []
    before = threading.stack_size(0)
    try:
        for _ in range((count - 1) * (2 if count > cores else 1)):
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise PortError(
            f"there is no room for the bundle's {count} threads on {cores} cores; plan it again with fewer `--threads`, or "
            "with more --ram"
        ) from error
    finally:
        threading.stack_size(before)
        done.set()
        for thread in started:
            thread.join()
