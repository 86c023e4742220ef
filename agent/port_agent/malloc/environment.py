"""The environment that starts a process with the budget-aware allocator, or with the nearest substitute."""

import enum
import os
import platform
import subprocess
import sys
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from port_agent.malloc.allocator import INTERFACE_VERSION, SMALLEST_BLOCK_BYTES

DRY_RUN_TIMEOUT_S = 20.0
"""A Python process that starts and ends takes 0.02 s here and a second on the slowest board."""
_DRY_RUN = f"""
import ctypes
block = bytearray({SMALLEST_BLOCK_BYTES} * 2)
process = ctypes.PyDLL(None)
version = process.port_malloc_version() if hasattr(process, "port_malloc_version") else None
raise SystemExit(None if version == {INTERFACE_VERSION} else f"its interface is {{version}}, not {INTERFACE_VERSION}")
"""


class PreloadMode(enum.Enum):
    """How a new process can be made frugal here; the value names it to the user."""

    PRELOAD = "budget-aware allocator (preloaded)"
    THRESHOLD = "glibc with a low mmap threshold: same peak memory, slower"
    LARGE_CACHE_OFF = (
        "macOS's malloc without its cache of large blocks: freed memory returns, each reuse costs page faults"
    )
    SYSTEM = "the system's malloc: freed memory may stay resident; preloading needs Linux with glibc"


def preload_path() -> Path | None:
    """Return the built shared object, or None if the installation could not build it."""
    here = Path(__file__).resolve().parent
    candidates = (here / f"budget_malloc{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def preload_mode() -> PreloadMode:
    """Return what `preload_environment` does on this machine."""
    if sys.platform == "darwin":
        return PreloadMode.LARGE_CACHE_OFF
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return PreloadMode.SYSTEM
    return PreloadMode.THRESHOLD if preload_trouble() else PreloadMode.PRELOAD


def preload_trouble() -> str:
    """Return why the allocator cannot be preloaded on a supported machine (Linux with glibc), or "".

    The object is tested in a separate process, once per file: one that was built for another machine or C library would
    otherwise keep every worker from starting.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return ""
    path = preload_path()
    if path is None:
        return "it was not built when this program was installed (no C compiler?)"
    # ld.so splits LD_PRELOAD at colons and LD_LIBRARY_PATH at colons and semicolons, without any way to quote.
    if ":" in str(path) or ";" in str(path):
        return f"its path has a colon or a semicolon, which the loader does not accept: {path}"
    return _dry_run(path, path.stat().st_mtime_ns)


@cache
def _dry_run(path: Path, modified_ns: int) -> str:
    """Return why a process with the object preloaded does not work, or nothing."""
    command = [sys.executable, "-I", "-S", "-c", _DRY_RUN]
    environment = {**os.environ, **_preload_variables(path)}
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=DRY_RUN_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}: {error}"
    if ran.returncode == 0:
        return ""
    output = ran.stderr.strip().splitlines()
    return f"{path} does not work on this machine: {output[0] if output else f'exit status {ran.returncode}'}"


def preload_environment(limit_bytes: int | None, *, hard_limit_bytes: int | None = None) -> dict[str, str]:
    """Return the variables to add to a new process's environment for the thriftiest malloc there is here.

    The allocator keeps its live and cached blocks together below `limit_bytes` (None: it caches all that is freed) and
    refuses requests that would lift live blocks above `hard_limit_bytes`. `preload_mode()` says which way was taken;
    in the process itself `active()` is an Allocator exactly when it was preloaded. The variables that are set in
    this process are taken into account (LD_PRELOAD is extended, not replaced).
    """
    mode, path = preload_mode(), preload_path()
    if mode is PreloadMode.SYSTEM:
        return {}
    if mode is PreloadMode.LARGE_CACHE_OFF:
        return {"MallocLargeCache": "0"}  # read by libmalloc at start; undocumented, so it may cease to work
    if mode is PreloadMode.THRESHOLD or path is None:
        threshold = str(SMALLEST_BLOCK_BYTES)
        return {"MALLOC_MMAP_THRESHOLD_": threshold, "MALLOC_TRIM_THRESHOLD_": threshold}
    variables = _preload_variables(path)
    if limit_bytes is not None:
        variables["PORT_MALLOC_LIMIT"] = str(limit_bytes)
    if hard_limit_bytes is not None:
        variables["PORT_MALLOC_HARD_LIMIT"] = str(hard_limit_bytes)
    return variables


def _preload_variables(path: Path) -> dict[str, str]:
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
