"""The hard memory limit around a foreground program, in case its budget does not hold.

Beyond it, the kernel rejects allocations or kills the program.

A systemd scope where there is a manager that enforces memory limits for this user: it counts what is really used, it
holds for every process of the program together, and it goes away with the last of them. RLIMIT_DATA elsewhere: it
counts the address space of each process separately. Address space that is only reserved is left out where our allocator
is preloaded (`malloc/reservations.c`), or where the process is watched (`hold_resident`).
"""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from port_planner.base.process_memory import PAGE_BYTES

_PROBE_TIMEOUT_S = 5.0
_READ_LIMIT = 'cat "/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/memory.max"'
_KIB = 1024


def scope_command(limit_bytes: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the words that run a command in a scope of at most `limit_bytes`.

    None if systemd does not enforce it.

    A test process checks this, because systemd accepts the limit even where the controller is not delegated.
    """
    systemd_run = shutil.which("systemd-run")
    if sys.platform != "linux" or systemd_run is None or not _manager_listens(environment):
        return []
    limit = limit_bytes // PAGE_BYTES * PAGE_BYTES  # as the kernel rounds memory.max
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
    """Lower this process's soft RLIMIT_DATA to `limit_bytes`; a lower limit stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [limit_bytes, *(bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))


def widen_data_limit(nbytes: int) -> None:
    """Raise the soft RLIMIT_DATA as far as the hard one allows; a negative `nbytes` lowers it.

    For private mappings of files: the kernel counts them in full, yet their unchanged pages can leave at any time.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = soft + nbytes if hard == resource.RLIM_INFINITY else min(soft + nbytes, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS does not allow lowering it below the memory in use
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def untouched_library_bytes() -> int:
    """Return how much of the writable data of loaded libraries nothing has touched; 0 but on Linux.

    The kernel counts it in full against RLIMIT_DATA, 390 MiB in a CUDA build of torch on a machine without a GPU.
    """
    if sys.platform != "linux":
        return 0
    untouched, of_library = 0, False
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        words = line.split(None, 5)  # qemu-user may print "VmFlags:" without a value
        if not words[0].endswith(":"):  # addresses, access, offset, device, inode, path
            of_library = words[1][1] == "w" and words[1][3] == "p" and words[-1].startswith("/")
        elif of_library and words[0] == "Size:":
            untouched += int(words[1]) * _KIB
        elif of_library and words[0] == "Rss:":
            untouched -= int(words[1]) * _KIB
    return untouched


def limit_data_of(pid: int, limit_bytes: int) -> None:
    """Set the soft RLIMIT_DATA of another process, as far as its hard one allows; only on Linux.

    Raises OSError where it has ended.
    """
    if sys.platform == "linux":
        _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        limit = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
        resource.prlimit(pid, resource.RLIMIT_DATA, (limit, hard))


def hold_resident(pid: int, resident_bytes: int) -> None:
    """Set another process's RLIMIT_DATA so that its resident memory cannot grow beyond `resident_bytes`.

    The limit counts address space: what is mapped but not touched (stacks of threads, buffers of libraries) is left
    out, and resident pages of files are included. These change, so call it repeatedly. A process that is already beyond
    the limit gets no more memory. Systems other than Linux are left alone. Raises OSError where it has ended.
    """
    if sys.platform != "linux":
        return
    found = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "VmData" in found:  # one that is ending has none
        data, anonymous, of_files = (_KIB * int(found[name].split()[0]) for name in ("VmData", "RssAnon", "RssFile"))
        limit_data_of(pid, max(0, data - anonymous + resident_bytes - of_files))
