"""An NVIDIA GPU: one computing stream, which is torch's default one, and one that copies.

Has not run on a GPU yet: the same executor ran against the simulated device of the tests, which is stricter about order.
`make check-gpu` says what it does on a real one.
"""

import contextlib
import os
import subprocess

import torch

from port_agent.backend.base import DeviceAbsentError, Event
from port_agent.backend.shared_memory import SharedMemory
from port_planner.ir.device_kinds import CUDA
from port_planner.torch_compat.devices import set_allocator

_INTEGRATED_CONTEXT_BYTES = 667 << 20
"""Of a GPU that shares the host's memory, where no driver says what a process holds: a context that loads all its modules
(pytorch#86509; 287 MB where they are loaded lazily)."""

_PINNED_AS_ASKED = "pinned_max_cached_size_mb:0"
"""Setting of torch's allocator of pinned memory: by default it takes the next power of two and keeps what is freed, which may be twice of
what a plan counts in the host's memory."""

_DRIVER_PATIENCE_S = 5.0


class CudaBackend:
    """A `Backend` on the first CUDA device; see `base` for what each of its words means."""

    kind = CUDA
    addressable = False

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise DeviceAbsentError(
                f"this step is for a CUDA GPU, and torch {torch.__version__} finds none; run it where there is one, or plan "
                "it again on the CPU"
            )
        self._device = torch.device(CUDA, 0)
        self.unified = bool(torch.cuda.get_device_properties(self._device).is_integrated)
        self._copies = torch.cuda.Stream(self._device)
        self._shared = SharedMemory(self._device, self.allocate_host, self.reached, self._bound)
        self._limit_bytes = self._total_bytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def allocate_shared(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory where the GPU computes in the host's; raises torch.OutOfMemoryError where the limit forbids it."""
        if not self.unified:
            return self.allocate(nbytes)
        if self.allocated_bytes() + nbytes > self._limit_bytes:
            raise torch.OutOfMemoryError(
                f"{nbytes} bytes asked for, {self.allocated_bytes()} of {self._limit_bytes} are in use"
            )
        return self._shared.allocate(nbytes)

    def host_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        return self._shared.host_view(memory)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        pin_as_asked()
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
        return torch.cuda.memory_allocated(self._device) + self._shared.live_bytes

    def outside_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        held = held_by(os.getpid(), card_name())
        if held is None and self.unified:
            return _INTEGRATED_CONTEXT_BYTES
        used = (
            total - free
        )  # of all processes, where the driver does not say which has what: too careful, never too little
        return max(0, (used if held is None else held) - torch.cuda.memory_reserved(self._device))

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) + self._shared.peak_bytes

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._shared.reset_peak()

    def limit(self, nbytes: int) -> None:
        self._limit_bytes = nbytes
        self._bound()

    def _bound(self) -> None:
        """Let torch's allocator have what shared memory leaves of the limit."""
        left = max(0, self._limit_bytes - self._shared.live_bytes)
        torch.cuda.set_per_process_memory_fraction(min(1.0, left / self._total_bytes), self._device)

    @property
    def _total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.default_stream(self._device)


def pin_as_asked() -> None:
    """Have torch take as much pinned memory as it is asked for, and give it back when it is freed.

    Of the whole process: not to be called in one that runs a program of the user's, whose loader of data lives on memory that is kept.
    """
    set_allocator(_PINNED_AS_ASKED)


def card_name() -> str:
    """Return what the driver calls the first card that torch uses: its UUID.

    Numbers of cards are not the driver's where CUDA_VISIBLE_DEVICES chooses.
    """
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def held_by(pid: int, card: str) -> int | None:
    """Return the bytes of a card's memory that the driver says a process holds; None where it does not say."""
    words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", "-i", card]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        output = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_DRIVER_PATIENCE_S).stdout
        held = {int(own): int(mib) << 20 for own, mib in (line.split(",") for line in output.splitlines())}
        return held.get(pid)
    return None


def _follow(stream: torch.cuda.Stream, event: Event) -> None:
    """Let a stream go on after an event; only a device's own is waited for by the device."""
    if isinstance(event, torch.cuda.Event):
        stream.wait_event(event)
    else:
        event.synchronize()
