"""Start Python processes of our own.

They import from where this package is installed, never from the directory in which they are started.
"""

import os
import sys
from pathlib import Path

from port_planner.base.source_roots import SOURCE_ROOTS

NEUTRAL_DIRECTORY = Path("/")
"""Working directory of a process that opens nothing by a relative path; only root may put a file there."""
_X86 = frozenset({"x86_64"})
"""Architectures on which torch computes with MKL."""
_WAITING_IS_SET_BY = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_MAX_KERNELS = "32"
"""Number of kernels that are kept.

A step of a transformer has fewer shapes, and a kernel takes a millisecond to recreate.
"""
_X86_SPINS = "30000"
"""Number of times that a thread of libgomp checks whether its partners are done before it sleeps.

That is 0.4 ms, where each check is a `pause` of x86. The default is 300,000 for all processors, however long a check
takes. If a partner has no core, as when the user keeps one busy, threads spin instead of yielding. Small steps of two
threads on one core took 39.7 s by default, 5.8 s with this value and 2.2 s with 10,000. With a core for each thread,
this value takes 0.75 to 1.0 of the default's time and 10,000 up to 1.25. Sleeping at once takes twice that time.
"""


def module_command(module: str) -> tuple[str, ...]:
    """Return the command that runs one of our modules; `-P` keeps the working directory off its import path."""
    return (sys.executable, "-P", "-m", module)


def threads_environment(threads: int) -> dict[str, str]:
    """Return variables that make torch compute with `threads` threads, and numpy's own OpenBLAS, which
    computes nothing here, with one.

    OpenBLAS maps 32 MiB for each thread and touches none of it, which RLIMIT_DATA counts. On ARM torch itself computes
    with it. Threads that wait for each other yield soon, unless the environment sets how long they spin.
    """
    x86 = os.uname().machine in _X86
    blas = {"OPENBLAS_NUM_THREADS": "1"} if threads == 1 or x86 else {}
    waiting = (
        {"GOMP_SPINCOUNT": _X86_SPINS} if x86 and not any(name in os.environ for name in _WAITING_IS_SET_BY) else {}
    )
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **blas, **waiting}


def few_kernels_environment() -> dict[str, str]:
    """Return variables that make torch and oneDNN keep few of the kernels that they make for each shape.
    Settings of the environment stay.

    By default both keep 1,024, of half a MiB each. The experts of a mixture meet new shapes in each step. A model of 6
    layers with 4 experts grew by 50 MiB per step by default, and by 4 MiB in total with these variables.
    """
    names = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    return {name: _MAX_KERNELS for name in names if name not in os.environ}


def one_thread_environment() -> dict[str, str]:
    """Return `module_environment` for a process whose libraries must compute with one thread."""
    return {**module_environment(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def module_environment() -> dict[str, str]:
    """Return this process's environment with our packages on PYTHONPATH and without relative entries there.

    An empty entry would be the working directory.
    """
    theirs = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entries = [*map(str, SOURCE_ROOTS), *(entry for entry in theirs if Path(entry).is_absolute())]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}
