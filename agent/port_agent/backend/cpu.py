"""The CPU: its memory is the process's own, and its work is done at once."""

import torch

from port_agent.backend.base import Event
from port_agent.backend.raw_bytes import block
from port_planner.ir.device_kinds import CPU


class Done:
    """The event of work that is already done."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True."""
        return True


DONE = Done()


class CpuBackend:
    """A `Backend` without streams; see `base` for the methods."""

    kind = CPU
    addressable = True
    unified = True

    def allocate(self, nbytes: int) -> torch.Tensor:
        return block(nbytes)

    def allocate_shared(self, nbytes: int) -> torch.Tensor:
        return block(nbytes)

    def host_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        return memory

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return block(nbytes)

    def reached(self) -> Event:
        return DONE

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        after.synchronize()
        target.copy_(source)
        return DONE

    def wait(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        """Return at once."""

    def generator_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def allocated_bytes(self) -> int:
        return 0

    def reserved_bytes(self) -> int:
        return 0

    def outside_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        """Do nothing: the peak of the process is the kernel's to count."""

    def limit(self, nbytes: int) -> None:
        """Do nothing: the process is bounded by its cgroup and by the preloaded allocator."""
