"""Storages of a step that wait packed for their next use: into reserved memory and back; what does not fit goes to flash."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from agent import packing
from agent.backend.raw_bytes import block
from agent.packing import Layout, PackingOverflowError, PackingUnavailableError, UnsuitableDataError
from agent.train.step_paging import StepPaging
from agent.train.step_values import StepValues
from planner.ir.costs import PackingCost
from planner.ir.devices.kinds import CPU
from planner.ir.errors import PortError


@dataclass(slots=True)
class PackingStats:
    """What a step packed: bytes before and after, and of those that needed more than was reserved, which went to flash.

    `overflows`: the storages that did, by number.
    """

    source_bytes: int = 0
    packed_bytes: int = 0
    spilled_bytes: int = 0
    overflows: list[int] = field(default_factory=list)


class StepPacking:
    """The packing of one program. Raises PortError where it cannot be done in this installation or with these directories."""

    def __init__(self, costs: Sequence[PackingCost], values: StepValues, paging: StepPaging) -> None:
        self.costs, self.values, self.paging = costs, values, paging
        self.stats = PackingStats()
        self._layouts = [self._layout(cost) for cost in costs]
        self._packed: dict[int, tuple[torch.Tensor, int]] = {}
        """Entry -> packed form and its size; an entry that was spilled is not here."""
        if costs and not packing.available():
            raise PackingUnavailableError(
                "this plan packs tensors, and packing was not built here; install a C compiler and reinstall the package, or "
                "plan the job again on this device"
            )
        if costs and values.graph.device != CPU:
            raise PortError(
                f"this plan packs tensors, which only the CPU does, and runs on {values.graph.device}; plan the job again there"
            )
        if costs and not paging.scratch:
            raise PortError("this plan packs tensors and needs a directory for what does not fit; give --page-dir")

    def _layout(self, cost: PackingCost) -> Layout:
        nbytes = self.values.graph.storages[cost.storage].nbytes
        count, rest = divmod(nbytes, cost.item_bytes)
        layout = Layout(cost.codec, count, cost.item_bytes)
        if rest or layout.source_bytes != nbytes:
            raise PortError(
                f"storage {cost.storage} has {nbytes} bytes, which are no items of {cost.item_bytes} to pack as "
                f"{cost.codec.value}; plan the job again"
            )
        return layout

    def pack(self, entry: int) -> None:
        """Pack a resident storage; the caller lets go of it then. What does not fit into what was reserved goes to flash."""
        cost, layout = self.costs[entry], self._layouts[entry]
        source, target = self.values.whole(cost.storage), block(cost.reserved_bytes)
        self.stats.source_bytes += source.numel()
        try:
            size = packing.pack(layout, source.data_ptr(), target.data_ptr(), cost.reserved_bytes)
        except (PackingOverflowError, UnsuitableDataError):
            del target
            self.stats.overflows.append(cost.storage)
            self.stats.spilled_bytes += source.numel()
            self.paging.write(cost.storage)
            self.paging.finish_write(cost.storage)
            return
        self.stats.packed_bytes += size
        self._packed[entry] = target, size

    def unpack(self, entry: int) -> None:
        """Make a packed storage resident again."""
        storage = self.costs[entry].storage
        if entry not in self._packed:
            self.paging.read(storage)
            self.paging.land(storage)
            return
        source, size = self._packed.pop(entry)
        target = block(self.values.graph.storages[storage].nbytes)
        packing.unpack(self._layouts[entry], source.data_ptr(), size, target.data_ptr())
        self.values.base[storage] = target

    def select(self, entry: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return what ReLU's backward pass makes of a gradient, from the signs of its activation that were packed."""
        signs, size = self._packed[entry]
        result = torch.empty_like(gradient)
        packing.select(self._layouts[entry], signs.data_ptr(), size, gradient.data_ptr(), result.data_ptr())
        return result

    def forget(self, entry: int) -> None:
        """Let go of a packed form that is not unpacked."""
        del self._packed[entry]

    def begin(self) -> None:
        """Count anew, for the next step."""
        self.stats = PackingStats()

    def drop(self) -> None:
        """Forget what is packed."""
        self._packed.clear()
