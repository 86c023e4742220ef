"""Transfers between the host's memory and a device's, while operators run on both.

A transfer begins as soon as the device has computed its source, and runs in parallel with the following work.
Work that needs its target, or frees or changes its source, waits: the host for its own memory, the device's
computation for the rest.
"""

from collections.abc import Iterable, Set

import torch

from port_agent.backend.base import Backend, Event
from port_agent.backend.transfer_ring import MIN_BYTES, RingCopy, TransferRing
from port_agent.training.step_values import StepValues
from port_planner.ir.device_kinds import CPU
from port_planner.ir.devices.transfers import StorageTransfer


class StepTransfers:
    """The transfers of one step that are in progress."""

    def __init__(self, values: StepValues, backend: Backend, ring: TransferRing | None = None) -> None:
        self.values, self.backend, self.ring = values, backend, ring
        self._events: dict[int, Event] = {}
        """Events of transfers by target."""

    def begin(self, transfer: StorageTransfer) -> None:
        """Begin to copy a resident storage into memory on the other side; does nothing if the copy exists."""
        if self.values.base[transfer.target] is not None:
            return
        source = self.values.whole(transfer.source)
        target = self.values.allocate(transfer.target)
        self.values.base[transfer.target] = target
        self._events[transfer.target] = self._copy(target[: source.numel()], source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Begin to copy: small contents directly, others through the ring if there is one."""
        if self.ring is None or source.numel() < MIN_BYTES:
            return self.backend.copy(target, source, self.backend.reached())
        if target.device.type == CPU:
            return self.ring.out_of_device(target, source)
        return self.ring.into_device(target, source)

    def wait(self, target: int, touched: int) -> None:
        """Make the next user of a storage, the target or the source of a transfer, wait for that transfer."""
        if self.values.graph.storages[touched].device == CPU:
            self._events[target].synchronize()
        else:
            event = self._events[target]
            self.backend.wait(event.landed() if isinstance(event, RingCopy) else event)

    def land(self) -> None:
        """Let every transfer in progress end."""
        for event in self._events.values():
            event.synchronize()

    def drop(self) -> None:
        """Let every transfer end and discard it."""
        self.land()
        self._events.clear()


class TransferWaits:
    """The transfers in progress at an instruction of a program, while its instructions are visited in order."""

    def __init__(self) -> None:
        self._by_storage: dict[int, set[int]] = {}

    def begins(self, transfer: StorageTransfer) -> None:
        """Record a transfer."""
        for storage in (transfer.source, transfer.target):
            self._by_storage.setdefault(storage, set()).add(transfer.target)

    def before(self, touched: Set[int]) -> list[tuple[int, int]]:
        """Return the waits (target, touched storage) before an instruction that needs these targets, or changes or
        frees these sources.
        """
        return [(target, s) for s in sorted(touched) for target in sorted(self._by_storage.pop(s, ()))]

    def into(self, storages: Iterable[int]) -> set[int]:
        """Return those of these storages that a transfer in progress fills; a source may also be read by others."""
        return {s for s in storages if s in self._by_storage.get(s, ())}
