"""An NVIDIA GPU: one computing stream, which is torch's current one, and one that copies.

Programs within `--gpu-ram` have run on an H200. Planned steps have run only on the simulated device of the tests, which
is stricter about order. `make check-gpu` shows what both do on a GPU.
"""

import contextlib
import os
import subprocess

import torch

from port_agent.backend.base import DeviceAbsentError, Event
from port_agent.backend.shared_memory import SharedMemory
from port_planner.ir.device_kinds import CUDA
from port_planner.torch_compat.devices import allocator_settings, set_allocator

_INTEGRATED_CONTEXT_BYTES = 667 << 20
"""Memory in bytes of the context on a GPU that shares the host's memory and whose driver does not report a process's
share. This is the size with all modules loaded (pytorch#86509); with lazy loading it is 287 MB.
"""

_PINNED_AS_ASKED = "pinned_max_cached_size_mb:0"
"""Setting that makes torch's allocator of pinned memory allocate what is asked.

By default it rounds up to the next power of two and keeps freed memory, which is twice what a plan counts.
"""

_GROWING = "expandable_segments"

_DRIVER_PATIENCE_S = 5.0


class CudaBackend:
    """A `Backend` on the first CUDA device; see `base` for the methods."""

    kind = CUDA
    addressable = False

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise DeviceAbsentError(
                f"this step is for a CUDA GPU, and torch {torch.__version__} finds none; run it where there is one, or "
                "plan it again on the CPU"
            )
        self._device = torch.device(CUDA, 0)
        self.unified = bool(torch.cuda.get_device_properties(self._device).is_integrated)
        self._copies = torch.cuda.Stream(self._device)
        self._shared = SharedMemory(self._device, self.allocate_host, self.reached, self._bound)
        self._limit_bytes = self._total_bytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def allocate_shared(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory if the GPU computes in the host's memory; raises
        torch.OutOfMemoryError if the limit forbids it.
        """
        if not self.unified:
            return self.allocate(nbytes)
        if self.allocated_bytes() + nbytes > self._limit_bytes:
            raise torch.OutOfMemoryError(
                f"{nbytes} bytes requested, but {self.allocated_bytes()} of {self._limit_bytes} are in use"
            )
        return self._shared.allocate(nbytes)

    def host_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        return self._shared.host_view(memory)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def reached(self) -> Event:
        event: torch.cuda.Event = self._computing().record_event()
        return event

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        with torch.cuda.stream(self._copies):
            _follow(self._copies, after)
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self._copies.record_event()
        return event

    def wait(self, event: Event) -> None:
        _follow(self._computing(), event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def generator_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device)

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self._device)

    def allocated_bytes(self) -> int:
        return self._counted("current") + self._shared.live_bytes

    def reserved_bytes(self) -> int:
        return self._counted("current", "reserved_bytes") + self._shared.live_bytes

    def outside_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        held = held_by(os.getpid(), card_name())
        if held is None and self.unified:
            return _INTEGRATED_CONTEXT_BYTES
        used = (
            total - free
        )  # of all processes, if the driver does not report each share: an overestimate, never too little
        return max(0, (used if held is None else held) - torch.cuda.memory_reserved(self._device))

    def peak_bytes(self) -> int:
        return self._counted("peak") + self._shared.peak_bytes

    def _counted(self, which: str, what: str = "allocated_bytes") -> int:
        """Return a count of the allocator in bytes.

        `torch.cuda.memory_allocated` creates 300 names for each call, which takes half a millisecond.
        """
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)[what]["all"][which])

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._shared.reset_peak()

    def limit(self, nbytes: int) -> None:
        self._limit_bytes = nbytes
        self._bound()

    def _bound(self) -> None:
        """Limit torch's allocator to what shared memory leaves of the limit."""
        left = max(0, self._limit_bytes - self._shared.live_bytes)
        torch.cuda.set_per_process_memory_fraction(min(1.0, left / self._total_bytes), self._device)

    @property
    def _total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


def pin_as_asked(kind: str) -> None:
    """Make torch allocate exactly the requested pinned memory of a CUDA device, and release it when it is
    freed; nothing for others.

    This affects the whole process: do not call it in one that runs the user's program, whose data loader relies on kept
    memory.
    """
    if kind == CUDA:
        set_allocator(_PINNED_AS_ASKED)


def grow_segments(kind: str) -> None:
    """Let torch's allocator of a CUDA device grow its segments, so that free memory is not
    fragmented; nothing for others.

    What is set already stays, this setting included. Never call it for a GPU that shares the host's memory: the driver
    of a Tegra ends the process.
    """
    if kind != CUDA or _GROWING in (asked := allocator_settings()):
        return
    with contextlib.suppress(RuntimeError):  # a build of torch, or a driver, without them
        set_allocator(",".join(filter(None, (asked, f"{_GROWING}:True"))))  # what is left out may return to its default


def card_name() -> str:
    """Return the driver's name of the first card that torch uses: its UUID.

    Indices differ from the driver's if CUDA_VISIBLE_DEVICES is set.
    """
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def held_by(pid: int, card: str) -> int | None:
    """Return the bytes of a card's memory that a process holds according to the driver; None
    if it does not report it.
    """
    words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", "-i", card]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        output = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_DRIVER_PATIENCE_S).stdout
        held = {int(own): int(mib) << 20 for own, mib in (line.split(",") for line in output.splitlines())}
        return held.get(pid)
    return None


def _follow(stream: torch.cuda.Stream, event: Event) -> None:
    """Make a stream wait for an event; the device itself only waits for its own events."""
    if isinstance(event, torch.cuda.Event):
        stream.wait_event(event)
    else:
        event.synchronize()
