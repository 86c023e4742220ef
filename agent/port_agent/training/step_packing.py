"""Storages of a step that are packed between uses, in reserved memory or on flash.

Contents that do not fit go to flash unpacked.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from port_agent import packing
from port_agent.backend.raw_bytes import block
from port_agent.packing import Layout, PackingOverflowError, PackingUnavailableError, UnsuitableDataError
from port_agent.paging.pager import Slot, Transfer
from port_agent.training.step_paging import StepPaging
from port_agent.training.step_values import StepValues
from port_planner.base.errors import PortError
from port_planner.ir.costs import Codec, PackingCost
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.packables import Packable, PackedReading, asked_interval


@dataclass(frozen=True, slots=True)
class Overflow:
    """Contents that did not fit into the reserved memory; `needed_bytes`: their packed size, None if they cannot be
    packed.
    """

    storage: int
    version: int
    needed_bytes: int | None


@dataclass(slots=True)
class PackingStats:
    """What a step packed: bytes before and after, and those that exceeded the reserved memory and went to flash."""

    source_bytes: int = 0
    packed_bytes: int = 0
    spilled_bytes: int = 0
    overflows: list[Overflow] = field(default_factory=list)
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Packed bytes of contents, by storage and version."""


def layout_of(what: Packable | PackingCost, graph: StepGraph) -> Layout:
    """Return how the contents of a storage are packed; `source_bytes` differs from their size if its items have
    another size than the codec's.
    """
    count = graph.storages[what.storage].nbytes // what.item_bytes
    interval = asked_interval(graph, what.storage) if what.codec is Codec.INSIDE else None
    return Layout(what.codec, count, what.item_bytes, interval or (0.0, 0.0))


class StepPacking:
    """The packing of one program. Raises PortError if this installation or these directories cannot do it."""

    def __init__(self, costs: Sequence[PackingCost], values: StepValues, paging: StepPaging) -> None:
        self.costs, self.values, self.paging = costs, values, paging
        self.stats = PackingStats()
        self._layouts = [self._layout(cost) for cost in costs]
        self._packed: dict[int, tuple[torch.Tensor, int]] = {}
        """Entry -> packed form and its size; spilled entries are absent."""
        self._paged: dict[int, tuple[Slot, int]] = {}
        """Entry -> the place of its packed form, and its size."""
        self._writes: dict[int, Transfer] = {}
        self._reads: dict[int, tuple[Transfer, torch.Tensor, int]] = {}
        if costs and not packing.available():
            raise PackingUnavailableError(
                "this plan packs tensors, and packing was not built here; install a C compiler and reinstall the "
                "package, or plan the job again on this device"
            )
        if costs and values.graph.device != CPU:
            raise PortError(
                f"this plan packs tensors, which only the CPU can do, but runs on {values.graph.device}; plan the "
                "job again there"
            )
        if costs and not paging.scratch:
            raise PortError("this plan packs tensors and needs a directory for what does not fit; give --page-dir")

    def _layout(self, cost: PackingCost) -> Layout:
        nbytes = self.values.graph.storages[cost.storage].nbytes
        layout = layout_of(cost, self.values.graph)
        if layout.source_bytes != nbytes:
            raise PortError(
                f"storage {cost.storage} has {nbytes} bytes, which is not a multiple of {cost.item_bytes}, so it "
                f"cannot be packed as {cost.codec.value}; plan the job again"
            )
        return layout

    def pack(self, entry: int, *, stays: bool = False) -> None:
        """Pack a resident storage, which the caller then frees. Contents that exceed the reserved memory go to flash.

        `stays`: it is read in packed form. In that case raises PackingOverflowError and UnsuitableDataError,
        because its size follows from the step. It does not raise if torch can compute on the contents from flash in
        the memory of the result.
        """
        cost, layout = self.costs[entry], self._layouts[entry]
        source, target = self.values.whole(cost.storage), block(cost.reserved_bytes)
        self.stats.source_bytes += source.numel()
        try:
            size = packing.pack(layout, source.data_ptr(), target.data_ptr(), cost.reserved_bytes)
        except (PackingOverflowError, UnsuitableDataError) as error:
            if stays and cost.codec is not Codec.INSIDE:
                raise
            del target
            suitable = isinstance(error, PackingOverflowError)
            needed = packing.packed_bytes(layout, source.data_ptr()) if suitable else None
            self.stats.overflows.append(Overflow(cost.storage, cost.version, needed))
            self.stats.spilled_bytes += source.numel()
            self.paging.write(cost.storage)
            self.paging.finish_write(cost.storage)
            return
        self.stats.packed_bytes += size
        self.stats.sizes[cost.storage, cost.version] = size
        self._packed[entry] = target, size

    def write(self, entry: int, target: int) -> None:
        """Begin to write a packed form to a paging target; the transfer holds its memory.

        A spilled form is already there.
        """
        if entry in self._packed:
            packed, size = self._packed.pop(entry)
            slot = self.paging.packed_slot(entry, target)
            self._paged[entry] = slot, size
            self._writes[entry] = self.paging.pager.send(slot, packed[:size])

    def finish_write(self, entry: int) -> None:
        """Wait until a packed form is written."""
        if entry in self._writes:
            self.paging.pager.wait(self._writes[entry])
            del self._writes[entry]

    def read(self, entry: int) -> None:
        """Begin to read a packed form back."""
        if entry in self._paged:
            slot, size = self._paged.pop(entry)
            target = block(size)
            self._reads[entry] = self.paging.pager.receive(slot, target, nbytes=size), target, size

    def land(self, entry: int) -> None:
        """Wait until a packed form is read."""
        if entry in self._reads:
            transfer, target, size = self._reads.pop(entry)
            self.paging.pager.wait(transfer)
            self._packed[entry] = target, size

    def failed_write(self) -> Exception | None:
        """Return why a write failed; None if none failed."""
        for transfer in self._writes.values():
            transfer.finished.wait()
        return next((t.error for t in self._writes.values() if t.error is not None), None)

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

    def computed(
        self, entry: int, reading: PackedReading, gradient: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        """Return an operator's result from a gradient and a packed form: a tensor of this shape, with torch's bits."""
        if entry not in self._packed:
            return self._computed_on_items(entry, gradient, shape)
        packed, size = self._packed[entry]
        result = torch.empty(shape, dtype=torch.float32)
        layout, source, given, to = self._layouts[entry], packed.data_ptr(), gradient.data_ptr(), result.data_ptr()
        match reading:
            case PackedReading.SELECT | PackedReading.SELECT_OTHERS:
                packing.select(layout, source, size, given, to, inverted=reading is PackedReading.SELECT_OTHERS)
            case PackedReading.MULTIPLY:
                packing.multiply(layout, source, size, given, to)
            case _:
                places = math.prod(shape[-2:])
                packing.scatter(layout, source, size, given, to, planes=result.numel() // places, places=places)
        return result

    def _computed_on_items(self, entry: int, gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return torch's result from a gradient and items that include a NaN, read into the result's own memory."""
        slot, layout = self.paging.slot(self.costs[entry].storage), self._layouts[entry]
        target = block(slot.nbytes)
        self.paging.pager.wait(self.paging.pager.receive(slot, target))
        items = target[: layout.source_bytes].view(torch.float32).view(torch.Size(shape))
        torch.ops.aten.hardtanh_backward.grad_input(gradient, items, *layout.interval, grad_input=items)
        return items

    def forget(self, entry: int) -> None:
        """Release a packed form without unpacking it; a spilled one has nothing in memory."""
        self._packed.pop(entry, None)

    def begin(self) -> None:
        """Reset the counters for the next step."""
        self.stats = PackingStats()

    def drop(self) -> None:
        """Let every transfer in progress end, and discard all packed forms."""
        for transfer in (*self._writes.values(), *(t for t, _, _ in self._reads.values())):
            transfer.finished.wait()
        self._writes.clear()
        self._reads.clear()
        self._paged.clear()
        self._packed.clear()
