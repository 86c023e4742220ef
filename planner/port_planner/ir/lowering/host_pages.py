"""Layout of a device's pages in the host's memory when that is a target: one block, laid out before the step.

Pinned memory is slow to allocate, so it is allocated once. The step's order is known, so every page has a fixed place.
"""

from collections.abc import Mapping, Sequence

from port_planner.base.direct_io import padded
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.placement import HostPages, Position
from port_planner.ir.program import PlanError

ALIGNMENT = 512
"""Bytes of which pages begin at multiples: copy engines of GPUs need this for full speed, and it is a sector."""


class HostMemoryError(PlanError):
    """The pages of a step need more host memory than is available: `needed_bytes` of `limit_bytes`."""

    def __init__(self, needed: int, limit: int) -> None:
        self.needed_bytes, self.limit_bytes = needed, limit
        super().__init__(
            f"the step's pages take {needed / 2**20:.1f} MiB of the host's memory, {limit / 2**20:.1f} MiB are "
            "available for them; raise --ram, or --gpu-ram so that fewer leave the device"
        )


def place_host_pages(
    graph: StepGraph, at: Sequence[Position], homes: Mapping[int, int], memory: Mapping[int, int | None]
) -> HostPages:
    """Return the places of the pages that go to a target in `memory` (number -> bytes, None: unlimited).

    A storage has one place, from its first write to its last return; places of storages that are out at different times
    may overlap; the largest are placed first. A persistent one (`homes`: the target of its pages) has its own copy.
    Raises HostMemoryError if they need more than the target has.
    """
    spans: dict[int, tuple[int, int]] = {}
    target_of: dict[int, int] = {}
    leaving: dict[int, int] = {}
    for i, position in enumerate(at):
        for s in position.returns:
            if s in leaving:
                first = spans.get(s, (leaving[s], i))[0]
                spans[s] = first, i
                del leaving[s]
        for s in position.writes:
            if position.targets.get(s, 0) in memory and s not in homes:
                leaving[s] = i
                target_of[s] = position.targets.get(s, 0)
    laid: list[tuple[int, int, int, int]] = []
    places: dict[int, int] = {}
    for s in sorted(spans, key=lambda s: (-graph.sizes[s], s)):
        start, stop = spans[s]
        size = -(-graph.sizes[s] // ALIGNMENT) * ALIGNMENT
        taken = sorted((low, high) for low, high, first, last in laid if first < stop and start < last)
        place = 0
        for low, high in taken:
            if place + size <= low:
                break
            place = max(place, high)
        laid.append((place, place + size, start, stop))
        places[s] = place
    nbytes = max((high for _, high, _, _ in laid), default=0)
    copies = frozenset(s for s, target in homes.items() if target in memory)
    needed = nbytes + sum(padded(graph.sizes[s]) for s in copies)
    for limit in {memory[target_of[s]] for s in places} | {memory[homes[s]] for s in copies}:
        if limit is not None and needed > limit:
            raise HostMemoryError(needed, limit)
    return HostPages(tuple(sorted(places.items())), nbytes, copies)
