"""Describe this machine's devices: `python -m port_agent.backend.examine` prints a JSON list.

It runs in a separate process, because torch and a device's context take more memory than the caller has.
"""

import contextlib
import sys
from importlib.metadata import entry_points
from pathlib import Path

import msgspec
import torch

from port_agent.backend.base import Backend, DeviceAbsentError
from port_agent.backend.choose import backend_of
from port_agent.backend.enforcement import ALLOCATOR, ALLOWED, PROBE_BYTES, enforced
from port_planner.base.process_memory import resident_bytes
from port_planner.ir.device_kinds import BACKEND_GROUP, CUDA, MPS
from port_planner.ir.devices.exactness import REORDERED
from port_planner.ir.torch_device import device_name


class DeviceReport(msgspec.Struct, frozen=True):
    """One device. `seen_by`: growth of each of the kernel's counters when `PROBE_BYTES` of its memory were taken.

    `enforced`: what each bound did about a process that took more (`port_agent.backend.enforcement`); `bounded`:
    whether torch's own limit held.
    """

    kind: str
    name: str
    unified: bool
    outside_bytes: int
    seen_by: dict[str, int]
    enforced: dict[str, str]
    bounded: bool
    reordered: int
    """Number of operators that are known not to give the same bits each time."""


def examined() -> list[DeviceReport]:
    """Return a report of each device that torch can use here, except the CPU."""
    found = []
    for kind in (CUDA, MPS, *sorted(entry_points(group=BACKEND_GROUP).names)):
        with contextlib.suppress(DeviceAbsentError):
            found.append(_report(backend_of(kind)))
    return found


def _report(backend: Backend) -> DeviceReport:
    kind = backend.kind
    outside = backend.outside_bytes()
    before = _counts()
    probe = backend.allocate(PROBE_BYTES).fill_(1)
    backend.synchronize()
    seen = {name: max(0, now - before[name]) for name, now in _counts().items() if name in before}
    del probe
    bounds = enforced(backend)
    return DeviceReport(
        kind,
        device_name(kind),
        backend.unified,
        outside,
        seen,
        bounds,
        bounds[ALLOCATOR] != ALLOWED,
        len(REORDERED.get(kind, {})),
    )


def _counts() -> dict[str, int]:
    counts = {"resident memory": resident_bytes()}
    with contextlib.suppress(OSError, ValueError, IndexError):
        place = Path("/proc/self/cgroup").read_text().splitlines()[-1].split("::")[1]
        counts["control group"] = int(Path(f"/sys/fs/cgroup{place}/memory.current").read_text())
    return counts


def main() -> int:
    """Print the reports; torch's version first."""
    sys.stdout.buffer.write(msgspec.json.encode([str(torch.__version__), examined()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
