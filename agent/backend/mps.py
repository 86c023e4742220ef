"""The GPU of an Apple chip: one stream, and memory that is the host's own.

Has not run on a Mac. Copies are blocking ones: a non-blocking copy from the host can arrive torn (pytorch#189690), and
there is no second stream to hide one on. What is paged goes through the host's memory all the same, for a tensor's address
there is none that the host may use.
"""

import torch

from agent.backend.base import DeviceAbsentError, Event
from agent.backend.cpu import DONE
from agent.backend.raw_bytes import block
from planner.ir.devices.kinds import MPS


class MpsBackend:
    """A `Backend` on Apple's GPU; see `base` for what each of its words means."""

    kind = MPS
    addressable = False
    unified = True

    def __init__(self) -> None:
        if not torch.backends.mps.is_available():
            raise DeviceAbsentError(
                f"this step is for an Apple GPU, and torch {torch.__version__} finds none; run it on such a Mac, or plan it "
                "again on the CPU"
            )
        self._peak = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8, device=MPS)
        self._peak = max(self._peak, self.allocated_bytes())
        return made

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

    def outside_bytes(self) -> int:
        return max(0, torch.mps.driver_allocated_memory() - torch.mps.current_allocated_memory())

    def peak_bytes(self) -> int:
        return max(self._peak, self.allocated_bytes())

    def reset_peak(self) -> None:
        self._peak = self.allocated_bytes()

    def limit(self, nbytes: int) -> None:
        torch.mps.set_per_process_memory_fraction(nbytes / torch.mps.recommended_max_memory())
