"""The environment that starts a process with the budget-aware allocator, or with the nearest thing to it."""

import enum
import os
import platform
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from agent.train.malloc.allocator import SMALLEST_BLOCK_BYTES


class PreloadMode(enum.Enum):
    """How a new process can be made thrifty here; the value says it to the user."""

    PRELOAD = "budget-aware allocator (preloaded)"
    THRESHOLD = "glibc with a low mmap threshold: same peak memory, slower; the allocator was not built here"
    LARGE_CACHE_OFF = (
        "macOS's malloc without its cache of large blocks: freed memory returns, each reuse costs page faults"
    )
    SYSTEM = "the system's malloc: freed memory may stay resident; preloading needs Linux with glibc"


def preload_path() -> Path | None:
    """Return the built shared object, or None where the installation could not build it."""
    here = Path(__file__).resolve().parent
    candidates = (here / f"budget_malloc{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def preload_mode() -> PreloadMode:
    """Return what `preload_environment` does on this machine."""
    if sys.platform == "darwin":
        return PreloadMode.LARGE_CACHE_OFF
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return PreloadMode.SYSTEM
    path = preload_path()
    # ld.so splits LD_PRELOAD at colons and LD_LIBRARY_PATH at colons and semicolons, without any way to quote.
    if path is None or ":" in str(path) or ";" in str(path):
        return PreloadMode.THRESHOLD
    return PreloadMode.PRELOAD


def preload_environment(limit_bytes: int | None, *, hard_limit_bytes: int | None = None) -> dict[str, str]:
    """Return the variables to add to a new process's environment for the thriftiest malloc there is here.

    The allocator keeps its live and cached blocks together below `limit_bytes` (None: it caches all that is freed) and
    refuses requests that would lift live blocks above `hard_limit_bytes`. `preload_mode()` says which way was taken;
    in the process itself `active()` is an Allocator exactly when it was preloaded. The variables that are set in
    this process are taken into account (LD_PRELOAD is extended, not replaced).
    """
    mode = preload_mode()
    if mode is PreloadMode.SYSTEM:
        return {}
    if mode is PreloadMode.LARGE_CACHE_OFF:
        return {"MallocLargeCache": "0"}  # read by libmalloc at start; undocumented, so it may cease to work
    if mode is PreloadMode.THRESHOLD:
        threshold = str(SMALLEST_BLOCK_BYTES)
        return {"MALLOC_MMAP_THRESHOLD_": threshold, "MALLOC_TRIM_THRESHOLD_": threshold}
    variables = _preload_variables(preload_path())
    if limit_bytes is not None:
        variables["PORT_MALLOC_LIMIT"] = str(limit_bytes)
    if hard_limit_bytes is not None:
        variables["PORT_MALLOC_HARD_LIMIT"] = str(hard_limit_bytes)
    return variables


def _preload_variables(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    if " " not in str(path):
        return {"LD_PRELOAD": _prepended("LD_PRELOAD", str(path))}
    # A blank separates entries of LD_PRELOAD but not of LD_LIBRARY_PATH: name the directory there.
    return {
        "LD_PRELOAD": _prepended("LD_PRELOAD", path.name),
        "LD_LIBRARY_PATH": _prepended("LD_LIBRARY_PATH", str(path.parent)),
    }


def _prepended(variable: str, entry: str) -> str:
    present = [part for part in os.environ.get(variable, "").split(":") if part and part != entry]
    return ":".join([entry, *present])
