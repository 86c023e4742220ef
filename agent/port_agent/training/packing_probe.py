"""The cost of packing: sizes and seconds for a running step's tensors, for the plans that are made after a dry run."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from port_agent import packing
from port_agent.backend.raw_bytes import block
from port_agent.training.step_packing import layout_of
from port_agent.training.step_values import StepValues
from port_planner.ir.costs import Codec, PackingCost
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.packables import Packable, packables
from port_planner.ir.plan import MIN_DECIDED_BYTES

MARGIN = 0.1
"""Factor on the stored items, for later batches that have more of them than the measured ones."""

WORTH_PACKING = 0.9
"""Share of a tensor's size above which packing is not worth its instructions."""

_SAMPLE_BYTES = 4 << 20
"""Bytes of a tensor that are used to measure speed: more than a core's own cache, and little
compared with a worker's memory.
"""


@dataclass(slots=True)
class _Seen:
    """The largest packed form of some contents, and the fewest seconds per byte in both directions."""

    packed_bytes: int = 0
    pack_s: float = math.inf
    unpack_s: float = math.inf


class PackingProbe:
    """Measures everything in one graph that could be packed, after the last operator before its idle time has run."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self._seen: dict[Packable, _Seen] = {}
        self._after: dict[int, list[Packable]] = defaultdict(list)
        for one in packables(graph, least_bytes=MIN_DECIDED_BYTES):
            self._after[one.after].append(one)

    def watchers(self) -> Mapping[int, Callable[[StepValues], None]]:
        """Return the functions to call after operators."""
        can = packing.available() and self.graph.device == CPU
        return {op: self._watcher(ones) for op, ones in self._after.items()} if can else {}

    def _watcher(self, ones: list[Packable]) -> Callable[[StepValues], None]:
        def look(values: StepValues) -> None:
            for one in ones:
                self._look(one, values)

        return look

    def _look(self, one: Packable, values: StepValues) -> None:
        contents = values.whole(one.storage)
        layout = layout_of(one, self.graph)
        seen = self._seen.setdefault(one, _Seen())
        seen.packed_bytes = max(seen.packed_bytes, packing.packed_bytes(layout, contents.data_ptr()))
        if seen.packed_bytes > WORTH_PACKING * contents.numel():
            return
        sample = replace(layout, count=min(layout.count, _SAMPLE_BYTES // one.item_bytes))
        most = packing.largest_bytes(sample)
        begin = time.thread_time()
        packed = block(most)
        size = packing.pack(sample, contents.data_ptr(), packed.data_ptr(), most)
        middle = time.thread_time()
        if one.codec.comes_back:  # otherwise what runs on the packed form takes no longer than on the items
            back = block(sample.source_bytes)
            packing.unpack(sample, packed.data_ptr(), size, back.data_ptr())
        share = layout.count / sample.count
        seen.pack_s = min(seen.pack_s, share * (middle - begin))
        seen.unpack_s = min(seen.unpack_s, share * (time.thread_time() - middle))

    def costs(self) -> tuple[PackingCost, ...]:
        """Return the packings that are worthwhile; joules stay 0 for the caller, who knows the machine's watts."""
        found = (self._cost(one, seen) for one, seen in self._seen.items() if math.isfinite(seen.pack_s))
        return tuple(sorted((cost for cost in found if cost is not None), key=lambda c: (c.storage, c.version)))

    def _cost(self, one: Packable, seen: _Seen) -> PackingCost | None:
        nbytes = self.graph.storages[one.storage].nbytes
        layout = layout_of(one, self.graph)
        density, reserved = 1.0, seen.packed_bytes
        if one.codec is Codec.BITMAP:
            flags = packing.largest_bytes(layout) - nbytes
            density = (seen.packed_bytes - flags) / nbytes
            reserved = flags + math.ceil(min(1.0, (1 + MARGIN) * density) * layout.count) * one.item_bytes
        if reserved > WORTH_PACKING * nbytes:
            return None
        return PackingCost(
            one.storage, one.version, one.codec, one.item_bytes, density, reserved, seen.pack_s, seen.unpack_s, 0.0
        )
