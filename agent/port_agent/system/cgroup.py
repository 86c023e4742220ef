"""The worker's own control group.

A hard memory limit, no swap, low CPU and IO weight (cgroup v2, delegated).

systemd 252 (Pi OS bookworm) does not know DelegateSubgroup=, so the agent moves itself into a leaf; only then may
controllers be enabled for the worker's group alongside it. Without delegation nothing here is possible, and the reason
becomes a health item.
"""

import contextlib
import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

from port_planner.base.errors import PortError

SUPERVISOR_LEAF = "supervisor"
WORKER_PREFIX = "worker-"
CONTROLLERS = ("memory", "cpu", "io", "pids")
WORKER_TASKS_MAX = 256
CPU_PERIOD_US = 100_000
LOWEST_CPU_WEIGHT = 1
"""Lowest CPU weight (1 to 10,000): any other process comes first."""
LOW_IO_WEIGHT = 10


class CgroupError(PortError):
    """Control groups cannot be used; `reason` says why, for the health item."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"control groups cannot be used: {reason}")


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of one worker. None leaves the kernel's default."""

    memory_bytes: int | None = None
    cpu_percent: float = 100.0
    """Limit in percent of all CPUs together."""
    cpu_weight: int = LOWEST_CPU_WEIGHT
    io_weight: int = LOW_IO_WEIGHT


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """Counters of memory.events: how often the limit was hit, and how many tasks the kernel killed for it."""

    oom: int = 0
    oom_kill: int = 0


class WorkerGroup:
    """The control group of one worker."""

    def __init__(self, path: Path, *, limits_memory: bool = True) -> None:
        self.path, self.limits_memory = path, limits_memory

    def configure(self, limits: WorkerLimits) -> tuple[str, ...]:
        """Write the limits and return the names of those that this kernel does not offer.

        Raises CgroupError when the memory limit cannot be set: a worker must not run without it unnoticed. Without a
        memory controller, its limits are among those named.
        """
        missing = []
        memory = "max" if limits.memory_bytes is None else str(limits.memory_bytes)
        cpus = os.cpu_count() or 1
        quota_us = int(CPU_PERIOD_US * cpus * limits.cpu_percent / 100)
        cpu = "max" if limits.cpu_percent >= 100 else str(max(1000, quota_us))
        values = {
            "memory.max": memory,
            "memory.swap.max": "0",
            "memory.oom.group": "1",
            "cpu.weight": str(limits.cpu_weight),
            "cpu.max": f"{cpu} {CPU_PERIOD_US}",
            "io.weight": f"default {limits.io_weight}",
            "pids.max": str(WORKER_TASKS_MAX),
        }
        for name, value in values.items():
            try:
                _write(self.path / name, value)
            except OSError as error:
                if name == "memory.max" and self.limits_memory:
                    raise CgroupError(f"{self.path / name}: {error.strerror}") from error
                missing.append(name)
        return tuple(missing)

    def memory_events(self) -> MemoryEvents:
        """Return the counters; zeros if the group is gone."""
        values = _pairs(self.path / "memory.events")
        return MemoryEvents(oom=values.get("oom", 0), oom_kill=values.get("oom_kill", 0))

    def cpu_s(self) -> float | None:
        """Return the CPU seconds that this group has used, or None if the file does not exist."""
        usage_us = _pairs(self.path / "cpu.stat").get("usage_usec")
        return None if usage_us is None else usage_us / 1e6

    def kill(self) -> None:
        """Kill everything inside (cgroup.kill, kernel 5.14 and later).

        On older kernels the caller must send signals.
        """
        with contextlib.suppress(OSError):
            _write(self.path / "cgroup.kill", "1")

    def remove(self) -> None:
        """Remove the group; one that is still dying is left for the next start to remove."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


class DelegatedTree:
    """The part of the hierarchy that belongs to the agent."""

    def __init__(self, base: Path, without_memory: str = "") -> None:
        """`without_memory`: why this kernel limits only processor, I/O and processes, but no memory;
        empty if it limits memory too.
        """
        self.base, self.without_memory = base, without_memory

    def worker(self, job_id: int, limits: WorkerLimits) -> tuple[WorkerGroup, tuple[str, ...]]:
        """Return a fresh, configured group for the worker of a job, and the limits that this kernel lacks.

        Raises CgroupError where the group cannot be made.
        """
        path = self.base / f"{WORKER_PREFIX}{job_id}-{time.monotonic_ns()}"
        try:
            path.mkdir()
        except OSError as error:
            raise CgroupError(f"{path}: {error.strerror}") from error
        group = WorkerGroup(path, limits_memory=not self.without_memory)
        try:
            return group, group.configure(limits)
        except CgroupError:
            group.remove()
            raise

    def clean(self) -> None:
        """Kill and remove what an earlier supervisor left behind."""
        for path in self.base.glob(f"{WORKER_PREFIX}*"):
            group = WorkerGroup(path)
            group.kill()
            group.remove()


def delegated_tree(proc: Path = Path("/proc"), mount: Path | None = None) -> DelegatedTree:
    """Move this process into a leaf and return the tree above it, ready for worker groups.

    A Pi as delivered boots without a memory controller (`DelegatedTree.without_memory`). Raises CgroupError when the
    hierarchy is not v2, has none of our controllers, or is not ours alone.
    """
    root = mount or cgroup2_mount(proc)
    own = root / own_path(proc).lstrip("/")
    base = own.parent if own.name == SUPERVISOR_LEAF else own
    try:
        available = (base / "cgroup.controllers").read_text().split()
    except OSError as error:
        raise CgroupError(f"{base}: {error.strerror}") from error
    found = f"the memory controller is not available in {base} (found: {' '.join(available) or 'none'})"
    if not set(CONTROLLERS) & set(available):
        raise CgroupError(found)
    if not os.access(base / "cgroup.subtree_control", os.W_OK):
        raise CgroupError(f"{base} is not delegated to this user (Delegate= in the unit)")
    if own is base or own == base:
        _move_to_leaf(base)
    _enable(base, [name for name in CONTROLLERS if name in available])
    return DelegatedTree(base, "" if "memory" in available else found)


def cgroup2_mount(proc: Path) -> Path:
    """Return the mount point of the unified hierarchy; raises CgroupError if it is not mounted."""
    try:
        lines = (proc / "self/mounts").read_text().splitlines()
    except OSError as error:
        raise CgroupError(f"{proc / 'self/mounts'}: {error.strerror}") from error
    mounts = [words[1] for line in lines if len(words := line.split()) > 2 and words[2] == "cgroup2"]
    if not mounts:
        raise CgroupError("no cgroup v2 hierarchy is mounted")
    return Path(mounts[0])


def own_path(proc: Path) -> str:
    """Return the path of this process's group in the unified hierarchy; raises CgroupError without one.

    Raises CgroupError where this process is in no group of the unified hierarchy.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError as error:
        raise CgroupError(f"{proc / 'self/cgroup'}: {error.strerror}") from error
    for line in lines:
        if line.startswith("0::"):
            return line[3:]
    raise CgroupError("this process is in no cgroup v2 hierarchy")


def _move_to_leaf(base: Path) -> None:
    """Move this process, which must be alone in `base`, into the supervisor's leaf."""
    own = os.getpid()
    try:
        others = {int(word) for word in (base / "cgroup.procs").read_text().split()} - {own}
    except OSError as error:
        raise CgroupError(f"{base / 'cgroup.procs'}: {error.strerror}") from error
    if others:
        raise CgroupError(f"{base} is shared with {len(others)} other processes, so it is not the agent's own")
    leaf = base / SUPERVISOR_LEAF
    try:
        leaf.mkdir(exist_ok=True)
        _write(leaf / "cgroup.procs", str(own))
    except OSError as error:
        raise CgroupError(f"{leaf}: {error.strerror}") from error


def _enable(base: Path, controllers: list[str]) -> None:
    """Enable controllers for the children one at a time, so that a missing io controller does
    not cost the memory limit.
    """
    for name in controllers:
        try:
            _write(base / "cgroup.subtree_control", f"+{name}")
        except OSError as error:
            if name == "memory":
                reason = "processes live in the group itself" if error.errno == errno.EBUSY else error.strerror
                raise CgroupError(f"{base}: cannot enable the memory controller: {reason}") from error


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _pairs(path: Path) -> dict[str, int]:
    """Return `name number` lines; empty when the file cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def system_oom_kills(proc: Path = Path("/proc")) -> int | None:
    """Return how often the kernel has killed a process for lack of memory since boot.

    Without a group of our own, this is the only hint.
    """
    return _pairs(proc / "vmstat").get("oom_kill")
