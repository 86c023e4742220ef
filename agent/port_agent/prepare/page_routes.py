"""How pages get from a device in the host's memory to files: through buffers to which they are copied, or directly.

Avoiding copies is not always faster, because the device may not cache memory that both can address. Both
ways are measured, including what the device and the page thread then do with the bytes. The medium is the
same for both, and is left out.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from port_agent.backend.base import Backend
from port_agent.backend.staging import Staging
from port_agent.paging.pager import BURST, PageError, PageFile, Pager, Slot
from port_agent.prepare.pools import copy_seconds
from port_planner.ir.costs import DeviceCosts, Flash
from port_planner.profiling.timing import shortest_run_s

_SAMPLE_BYTES = BURST
_REPEATS = 5
_WORTH_SHARING = 0.95
"""Share of the seconds with copies below which sharing memory must stay, so that it saves more than measurement noise;
otherwise pages are copied.
"""


@dataclass(frozen=True, slots=True)
class PageRoutes:
    """Seconds for writing and reading a sample of `nbytes`, including one computation by the device and one
    check by the page thread.

    `out_s`, `into_s`: seconds of its copies. `copied_s`: seconds with copies. `shared_s`: seconds without copies, None
    if the host cannot address the device's memory.
    """

    nbytes: int
    out_s: float
    into_s: float
    copied_s: float
    shared_s: float | None

    @property
    def shares(self) -> bool:
        """Whether pages are moved without copies."""
        return self.shared_s is not None and self.shared_s < _WORTH_SHARING * self.copied_s

    def applied(self, device: DeviceCosts) -> DeviceCosts:
        """Return the costs of a device whose pages use the faster way; if they are copied, no medium
        is faster than the copies.
        """
        if self.shares:
            return replace(device, shares_pages=True)
        first, *others = (self._no_faster(target, device.compute_watts) for target in device.targets)
        return replace(device, flash=first, scratch_targets=tuple(others))

    def _no_faster(self, flash: Flash, watts: float) -> Flash:
        out_s, into_s = self.out_s / self.nbytes, self.into_s / self.nbytes
        return replace(
            flash,
            write_bytes_per_s=min(flash.write_bytes_per_s, 1 / out_s),
            read_bytes_per_s=min(flash.read_bytes_per_s, 1 / into_s),
            write_joules_per_byte=flash.write_joules_per_byte + watts * out_s,
            read_joules_per_byte=flash.read_joules_per_byte + watts * into_s,
        )


def measured_page_routes(backend: Backend, page_dir: Path) -> PageRoutes:
    """Return the times of both ways between a device in the host's memory and files in `page_dir`."""
    own, buffer = backend.allocate(_SAMPLE_BYTES), backend.allocate_host(_SAMPLE_BYTES)
    out, into = copy_seconds(backend, buffer, own), copy_seconds(backend, own, buffer)
    copied = out + into + _computing(backend, own) + _checking(buffer)
    shared = backend.allocate_shared(_SAMPLE_BYTES)
    without: float | None = None
    if _comes_back(backend, shared, page_dir):
        computing = _computing(backend, shared)
        view = backend.host_view(shared)
        without = None if view is None else computing + _checking(view)
    return PageRoutes(_SAMPLE_BYTES, out, into, copied, without)


def _computing(backend: Backend, memory: torch.Tensor) -> float:
    words = memory.view(torch.int32)

    def run() -> None:
        words.add_(1)
        backend.synchronize()

    return shortest_run_s(run, _REPEATS)


def _checking(memory: torch.Tensor) -> float:
    return shortest_run_s(lambda: xxhash.xxh3_64_intdigest(memory.numpy().data), _REPEATS)


def _comes_back(backend: Backend, memory: torch.Tensor, page_dir: Path) -> bool:
    """Return whether a page written from this memory without copies is read back unchanged, because not all
    memory can be written to files.
    """
    memory.fill_(1)
    backend.synchronize()
    if backend.host_view(memory) is None:
        return False
    pager = Pager(staging=Staging(backend, BURST, shares=True))
    with tempfile.TemporaryDirectory(dir=page_dir) as folder:
        file = PageFile(Path(folder) / "sample")
        slot = Slot(file, 0, memory.numel())
        try:
            file.reserve(memory.numel())
            pager.send(slot, memory).join()
            memory.fill_(0)
            back = pager.receive(slot, memory)
            back.join()
            pager.arrived(back)
        except PageError:
            return False
        finally:
            pager.close()
            file.close()
    return bool((memory == 1).all())
