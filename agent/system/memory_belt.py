"""The hard belt around a foreground program.

What the kernel refuses or kills when a budget does not hold.

A systemd scope where there is a manager that enforces memory limits for this user: it counts what is really used, it holds
for every process of the program together, and it goes away with the last of them. RLIMIT_DATA elsewhere: it counts address
space, for each process alone; what is only reserved is left out where our allocator is preloaded (`malloc/reservations.c`).
"""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_PROBE_TIMEOUT_S = 5.0
_READ_LIMIT = 'cat "/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/memory.max"'
_PAGE = 4096
"""The kernel rounds memory.max down to whole pages; 4 KiB divides every page size."""


def scope_command(limit_bytes: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the words that run a command in a scope of at most `limit_bytes`.

    None where nobody enforces it.

    Tried with a process of its own, because systemd takes the limit also where the controller is not delegated.
    """
    systemd_run = shutil.which("systemd-run")
    if sys.platform != "linux" or systemd_run is None or not _manager_listens(environment):
        return []
    limit = limit_bytes // _PAGE * _PAGE
    whose = [] if os.geteuid() == 0 else ["--user"]
    words = [
        systemd_run, *whose, "--scope", "--quiet", "--collect", "-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0", "--",
    ]  # fmt: skip
    try:
        probe = subprocess.run(
            [*words, "sh", "-c", _READ_LIMIT], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    enforced = probe.returncode == 0 and probe.stdout.strip() == str(limit)
    return words if enforced else []


def _manager_listens(environment: Mapping[str, str]) -> bool:
    if not Path("/run/systemd/system").is_dir():  # sd_booted(3)
        return False
    if os.geteuid() == 0:
        return True
    runtime = environment.get("XDG_RUNTIME_DIR")
    return runtime is not None and (Path(runtime) / "systemd/private").exists()


def limit_data(limit_bytes: int) -> None:
    """Lower this process's soft RLIMIT_DATA to `limit_bytes`; one that is lower already stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [limit_bytes, *(bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))


def widen_data_limit(nbytes: int) -> None:
    """Raise (or lower, `nbytes` negative) the soft RLIMIT_DATA, as far as the hard one allows.

    For private mappings of files: the kernel counts them in full, yet their unchanged pages can leave at any time.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = soft + nbytes if hard == resource.RLIM_INFINITY else min(soft + nbytes, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses to lower it below what is in use
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
