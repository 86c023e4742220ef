"""Whether guarded memory works on this machine, tested in a separate process."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from port_agent.guard.memory import guard_environment
from port_agent.malloc import PreloadMode, preload_mode, preload_trouble

PATIENCE_S = 30.0
"""Writing and reading two MiB takes 0.05 s here; a busy SD card takes seconds."""
MIN_MAPPINGS = 65530
"""The kernel's default. Blocks whose pages have different protection need one mapping each."""
_USERFAULTFD = Path("/dev/userfaultfd")
_TRY = """
import ctypes, json
library = ctypes.CDLL(None)
library.port_guard_try.restype = ctypes.c_long
from port_agent.guard.memory import active_guard
guard = active_guard()
wrong = None if guard is None else library.port_guard_try()
print(json.dumps({"wrong": wrong, **({} if guard is None else
      {name: getattr(guard.counters(), name) for name in ("read_faults", "moved_bytes")})}))
"""


@dataclass(frozen=True, slots=True)
class GuardProbe:
    """The result of the test."""

    trouble: str
    """Why guarded memory does not work here; empty if it works."""
    moves_pages: bool
    """Whether pages move from block to block (MREMAP_DONTUNMAP, Linux 5.7) instead of going back to the kernel."""
    page_bytes: int
    max_mappings: int | None
    """`vm.max_map_count`; None: unknown."""
    seccomp: bool
    """Whether system calls are filtered; the test ran under the same filter."""
    userfaultfd: bool
    """Whether this user may open /dev/userfaultfd."""


def probe_guard(page_dir: Path) -> GuardProbe:
    """Test guarded memory, with a page file in `page_dir`."""
    trouble, moves_pages = _tried(page_dir)
    return GuardProbe(
        trouble=trouble,
        moves_pages=moves_pages,
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        max_mappings=_number(Path("/proc/sys/vm/max_map_count")),
        seccomp="\nSeccomp:\t2" in _text(Path("/proc/self/status")),
        userfaultfd=os.access(_USERFAULTFD, os.R_OK | os.W_OK),
    )


def _tried(page_dir: Path) -> tuple[str, bool]:
    if preload_mode() is not PreloadMode.PRELOAD:
        return preload_trouble() or "it needs Linux with glibc", False
    source_root = str(Path(__file__).resolve().parents[2])
    added = guard_environment(page_dir, tensor_bytes=1 << 20, process_bytes=None)
    environment = {**os.environ, **added, "PYTHONPATH": os.pathsep.join((source_root, *map(str, sys.path)))}
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _TRY],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the test did not end ({error})", False
    if ran.returncode < 0:
        return f"the test was killed by {signal.Signals(-ran.returncode).name}", False
    if ran.returncode:
        message = ran.stderr.strip().splitlines()
        return message[-1] if message else f"the test ended with status {ran.returncode}", False
    return _judged(json.loads(ran.stdout), ran.stderr.strip())


def _judged(found: dict[str, int | None], message: str) -> tuple[str, bool]:
    wrong, faults = found["wrong"], found.get("read_faults")
    if wrong is None or wrong < 0:
        return message or "no memory could be guarded", False
    if wrong or not faults:
        return f"{wrong} words came back with different values in {faults} faults", False
    return "", bool(found["moved_bytes"])


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
