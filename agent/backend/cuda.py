"""An NVIDIA GPU: one computing stream, which is torch's default one, and one that copies.

Has not run on a GPU yet: the same executor ran against the simulated device of the tests, which is stricter about order.
`make check-gpu` says what it does on a real one.
"""

import contextlib
import os
import subprocess

import torch

from agent.backend.base import DeviceAbsentError, Event
from planner.ir.devices.kinds import CUDA

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

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

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
        return torch.cuda.memory_allocated(self._device)

    def outside_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        held = held_by(os.getpid(), torch.cuda.get_device_properties(self._device).uuid)
        if held is None and self.unified:
            return _INTEGRATED_CONTEXT_BYTES
        used = (
            total - free
        )  # of all processes, where the driver does not say which has what: too careful, never too little
        return max(0, (used if held is None else held) - torch.cuda.memory_reserved(self._device))

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def limit(self, nbytes: int) -> None:
        total = torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self._device)

    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.default_stream(self._device)


def pin_as_asked() -> None:
    """Have torch take as much pinned memory as it is asked for, and give it back when it is freed.

    Of the whole process: not to be called in one that runs a program of the user's, whose loader of data lives on memory that is kept.
    """
    torch._C._accelerator_setAllocatorSettings(_PINNED_AS_ASKED)


def held_by(pid: int, card: object) -> int | None:
    """Return the bytes of a card's memory that the driver says a process holds; None where it does not say.

    `card`: its UUID, as torch has it; numbers of cards are not the driver's where CUDA_VISIBLE_DEVICES chooses.
    """
    words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", "-i", f"GPU-{card}"]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_DRIVER_PATIENCE_S).stdout
        held = {int(own): int(mib) << 20 for own, mib in (line.split(",") for line in said.splitlines())}
        return held.get(pid)
    return None


def _follow(stream: torch.cuda.Stream, event: Event) -> None:
    """Let a stream go on after an event; only a device's own is waited for by the device."""
    if isinstance(event, torch.cuda.Event):
        stream.wait_event(event)
    else:
        event.synchronize()
