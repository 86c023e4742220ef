"""The GPU of an Apple chip: one stream, and memory that is the host's own.

This has not run on a Mac. Copies are blocking: a non-blocking copy from the host can arrive torn (pytorch#189690),
and there is no second stream to hide one on. The host may not use a tensor's address, but torch has another address
for the same memory that it may use (`_host_alias_storage`, as safetensors loads weights). A measurement decides
whether pages go through copies.
"""

from typing import Protocol

import torch

from port_agent.backend.base import DeviceAbsentError, Event
from port_agent.backend.cpu import DONE
from port_agent.backend.raw_bytes import block
from port_planner.ir.device_kinds import MPS
from port_planner.torch_compat.devices import host_alias

_MIN_FRACTION, _MAX_FRACTION = 1e-6, 2.0
"""Range of torch's limit as a fraction of the memory that Metal recommends; a limit of 0 would allow no memory."""


class Counts(Protocol):
    """torch's counters of this process's memory on the GPU, as in `torch.mps`, which has no peak."""

    def current_allocated_memory(self) -> int:
        """Return the bytes that tensors hold."""

    def driver_allocated_memory(self) -> int:
        """Return the bytes allocated by Metal: tensors, freed memory that the allocator keeps, and everything else."""

    def empty_cache(self) -> None:
        """Release the freed memory that the allocator keeps."""


class HighWater:
    """The peak of tensors: what they hold now and the freed memory that the allocator keeps.

    Never too low; too high by the unused space between tensors.
    """

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self._known = self._outside = 0
        self.reset()

    def reset(self) -> None:
        """Restart from what tensors hold now."""
        self.outside_bytes()
        self._known = self.counts.current_allocated_memory()

    def outside_bytes(self) -> int:
        """Return the bytes that Metal allocated for anything but tensors and memory kept for them."""
        self._known = self.peak_bytes()  # which is no longer visible once freed memory is released
        self.counts.empty_cache()
        self._outside = max(0, self.counts.driver_allocated_memory() - self.counts.current_allocated_memory())
        return self._outside

    def peak_bytes(self) -> int:
        """Return the most since `reset`."""
        kept = self.counts.driver_allocated_memory() - self._outside
        return max(self._known, self.counts.current_allocated_memory(), kept)


def fraction_of(nbytes: int, recommended_bytes: int) -> float:
    """Return the fraction of the recommended memory, for torch's limit, that allows tensors `nbytes`."""
    return min(max(nbytes / recommended_bytes, _MIN_FRACTION), _MAX_FRACTION)


class MpsBackend:
    """A `Backend` on Apple's GPU; see `base` for the methods."""

    kind = MPS
    addressable = False
    unified = True

    def __init__(self) -> None:
        if not torch.backends.mps.is_available():
            raise DeviceAbsentError(
                f"this step is for an Apple GPU, and torch {torch.__version__} finds none; run it on such a Mac, or "
                "plan it again on the CPU"
            )
        self._high_water = HighWater(torch.mps)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=MPS)

    def allocate_shared(self, nbytes: int) -> torch.Tensor:
        return self.allocate(nbytes)

    def host_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        torch.mps.synchronize()
        begin, host = memory.storage_offset(), host_alias(memory.untyped_storage())
        view: torch.Tensor = torch.empty(0, dtype=torch.uint8).set_(host, begin, (memory.numel(),), (1,))
        return view

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return block(nbytes)

    def reached(self) -> Event:
        return DONE

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        after.synchronize()
        target.copy_(source)
        torch.mps.synchronize()
        return DONE

    def wait(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def generator_state(self) -> torch.Tensor:
        return torch.mps.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.mps.set_rng_state(state)

    def allocated_bytes(self) -> int:
        return torch.mps.current_allocated_memory()

    def reserved_bytes(self) -> int:
        return torch.mps.driver_allocated_memory()

    def outside_bytes(self) -> int:
        return self._high_water.outside_bytes()

    def peak_bytes(self) -> int:
        return self._high_water.peak_bytes()

    def reset_peak(self) -> None:
        self._high_water.reset()

    def limit(self, nbytes: int) -> None:
        torch.mps.set_per_process_memory_fraction(fraction_of(nbytes, torch.mps.recommended_max_memory()))
