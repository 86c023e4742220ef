"""The interface between the executor and a compute device."""

from typing import Protocol

import torch

from port_planner.base.errors import PortError


class DeviceAbsentError(PortError):
    """A step needs a device that this machine, or this build of torch, does not have."""


class Event(Protocol):
    """A point in the work given to a device."""

    def synchronize(self) -> None:
        """Return once the device has passed it."""

    def query(self) -> bool:
        """Return whether the device has passed it."""


class Backend(Protocol):
    """One device: its memory, one stream that computes and one that copies, and its generator.

    Host and device order their work by events alone: a copy starts after the event that it is given, and its readers
    wait for the event that it returns. Memory is freed by its owner, and only after waiting for the copy's event.
    """

    kind: str
    """One of `port_planner.ir.device_kinds`."""
    addressable: bool
    """Whether the page thread may read and write the device's memory by address; otherwise pages pass through host
    memory."""
    unified: bool
    """Whether the device uses the host's memory, so that one budget covers both."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return at least `nbytes` bytes of the device's memory; raises
        torch.OutOfMemoryError if the cap forbids it.
        """

    def allocate_shared(self, nbytes: int) -> torch.Tensor:
        """Return memory as `allocate` does, which the host can also address if the device has such memory."""

    def host_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        """Return bytes of the device's memory as the host's, without a copy; None if the host cannot address them.

        Call this after the device is done with them. Work that the device is given later sees what the host writes
        there.
        """

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Return at least `nbytes` bytes of the host's memory, block-aligned, that copies
        reach without another copy.
        """

    def reached(self) -> Event:
        """Return the point up to which the computing stream has been given work."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Copy bytes on the copying stream once `after` has passed; return the event that marks the copy's end.

        Any thread may call it.
        """

    def wait(self, event: Event) -> None:
        """Make the computing stream wait for `event`; the host does not wait."""

    def synchronize(self) -> None:
        """Return once the device has finished all its work."""

    def generator_state(self) -> torch.Tensor:
        """Return the state of the device's default generator, on the host."""

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Put the device's default generator into this state."""

    def allocated_bytes(self) -> int:
        """Return the bytes of the device's memory that tensors hold now; 0 on the CPU,
        whose allocator counts itself.
        """

    def reserved_bytes(self) -> int:
        """Return the bytes that the device's allocator has for tensors, gaps between them included; 0 on the CPU."""

    def outside_bytes(self) -> int:
        """Return the bytes of the device's memory that this process holds besides tensors (context,
        libraries); 0 on the CPU.

        Takes some tenths of a second if the driver's own program is asked.
        """

    def peak_bytes(self) -> int:
        """Return the most bytes that tensors have held since `reset_peak`; 0 on the CPU."""

    def reset_peak(self) -> None:
        """Restart the peak."""

    def limit(self, nbytes: int) -> None:
        """Limit tensors to `nbytes` of the device's memory; does nothing on the CPU, where
        the kernel enforces limits.
        """
