"""Find what stops a process that exceeds its share of a device's memory, by tests in separate
processes that may exceed it.

`python -m port_agent.backend.enforcement KIND BOUND ...` is such a process: it reports that it has begun and
then, for each bound in turn, whether more memory was refused. If the kernel kills it, the first bound without a
report is the one that acted.
"""

import contextlib
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from port_agent.backend.base import Backend
from port_agent.backend.choose import backend_of
from port_agent.system.cgroup import CgroupError, cgroup2_mount, own_path
from port_agent.system.memory_limit import scope_command
from port_agent.system.python_process import module_command, module_environment
from port_planner.base.process_memory import PAGE_BYTES, available_bytes, resident_bytes

PROBE_BYTES = 64 << 20
"""Bytes of device memory that are allocated to see which counter notices: enough to stand out, and
small enough to be available.
"""
_LIMIT_BYTES = PROBE_BYTES // 4
"""Limit of the test process."""

ALLOCATOR, DATA, GROUP = "a limit of torch's allocator", "RLIMIT_DATA", "a control group"
REFUSED, ALLOWED, KILLED = "refuses more", "allows more", "kills the process"
_BEGUN = "begun"
_PATIENCE_S = 60.0
_FIRST_TO_GO = "1000"
"""The kernel's OOM score that makes it kill the test process before any of the user's processes."""
_NO_LIMIT = 1 << 62
_HEADROOM_BYTES = 512 << 20
"""Memory of the machine that must be free besides the test."""


class _UntriedError(Exception):
    """A bound cannot be set here; the text says why."""


def enforced(backend: Backend) -> dict[str, str]:
    """Return what each bound does when a process takes more device memory: `REFUSED`, `ALLOWED`, `KILLED`,
    or why that is not known.
    """
    return tried(backend.kind, (ALLOCATOR, DATA)) | _in_a_group(backend)


def _in_a_group(backend: Backend) -> dict[str, str]:
    """Test a control group whose limit leaves a process like this one slightly more than it holds."""
    limit = resident_bytes() + backend.outside_bytes() + PROBE_BYTES
    if available_bytes() < limit + PROBE_BYTES + _HEADROOM_BYTES:
        return {GROUP: "was not tested: too little memory is free"}
    scope = scope_command(limit)
    if not scope:
        return {GROUP: "was not tested: this user cannot get a limited group"}
    return tried(backend.kind, (GROUP,), scope)


def tried(kind: str, bounds: tuple[str, ...], within: Sequence[str] = ()) -> dict[str, str]:
    """Return the outcome of each bound, tested one after another in one process.

    `within`: command that runs it in a scope.
    """
    words = [*within, *module_command(__name__), kind, *bounds]
    try:
        done = subprocess.run(words, env=module_environment(), capture_output=True, text=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(bounds, f"was not tested: no answer within {_PATIENCE_S:g} s")
    return outcomes(bounds, done.stdout.splitlines(), done.returncode)


def outcomes(bounds: tuple[str, ...], output: list[str], ended: int) -> dict[str, str]:
    """Return the outcome of each bound from a process's output lines and exit status."""
    if not output:
        return dict.fromkeys(bounds, f"was not tested: the test process ended with {ended} before it began")
    found = dict(zip(bounds, output[1:], strict=False))
    left = [bound for bound in bounds if bound not in found]
    if left and ended in (-signal.SIGKILL, -signal.SIGABRT, 128 + signal.SIGKILL, 128 + signal.SIGABRT):
        found[left.pop(0)] = KILLED
    return found | dict.fromkeys(left, f"was not tested: the test process ended with {ended}")


def main(arguments: list[str]) -> int:
    """Test each bound of the command line on a kind of device, and print the outcome."""
    kind, *bounds = arguments
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    backend = backend_of(kind)
    backend.allocate(_LIMIT_BYTES).fill_(1)
    backend.synchronize()
    _write(_BEGUN)
    for bound in bounds:
        try:
            _write(TRIES[bound](backend))
        except _UntriedError as reason:
            _write(f"was not tested: {reason}")
    return 0


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _taken(backend: Backend, nbytes: int) -> str:
    """Allocate `nbytes` of the device's memory in parts, and return whether that was allowed."""
    held = []
    try:
        for _ in range(-(-nbytes // PROBE_BYTES)):
            held.append(backend.allocate(PROBE_BYTES).fill_(1))
            backend.synchronize()
    except (RuntimeError, MemoryError, OSError):  # the exception differs between devices
        return REFUSED
    return ALLOWED


def _by_allocator(backend: Backend) -> str:
    backend.limit(backend.allocated_bytes() + _LIMIT_BYTES)
    try:
        return _taken(backend, PROBE_BYTES)
    finally:
        backend.limit(_NO_LIMIT)


def _by_data(backend: Backend) -> str:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
    except (OSError, IndexError, ValueError) as error:
        raise _UntriedError("this system does not report what it counts") from error
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (pages * PAGE_BYTES + _LIMIT_BYTES, hard))
    try:
        return _taken(backend, PROBE_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _by_group(backend: Backend) -> str:
    try:
        group = cgroup2_mount(Path("/proc")) / own_path(Path("/proc")).lstrip("/")
        most, now = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (CgroupError, OSError, ValueError) as error:
        raise _UntriedError("this one's limit cannot be read") from error
    return _taken(backend, max(0, most - now) + PROBE_BYTES)


TRIES: Mapping[str, Callable[[Backend], str]] = {ALLOCATOR: _by_allocator, DATA: _by_data, GROUP: _by_group}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
