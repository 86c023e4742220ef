"""A lower bound on the cost of a placed plan's program, known before its instructions are emitted.

At that point, everything that it runs and moves is known, except its waits. A search that has a
cheaper plan can stop there.
"""

from collections.abc import Iterable

from port_planner.ir.costs import Flash
from port_planner.ir.lowering.placement import Placement


def min_joules(placement: Placement) -> float:
    """Return the joules, including wear, of the program if it only waits for a page thread that is always busy."""
    device, ops = placement.costs.device, placement.costs.ops
    again = [ops[r] for reruns in placement.reruns.values() for r, _ in reruns]
    packs = [cost for position in placement.at for cost in position.packs]
    unpacks = [cost for position in placement.at for cost in position.unpacks]
    seconds = sum(op.seconds for op in (*ops, *again))
    seconds += sum(cost.pack_seconds for cost in packs) + sum(cost.unpack_seconds for cost in unpacks)
    moved = _Traffic(placement)
    joules = sum(op.joules for op in (*ops, *again)) + sum(cost.joules for cost in packs) + moved.joules
    return joules + device.static_watts * max(seconds, moved.paging_s)


class _Traffic:
    """The cost of a step's transfers, counted as `emit` does: joules with wear, and seconds of the page thread."""

    def __init__(self, placement: Placement) -> None:
        self.x, self.size = placement, placement.size
        self.targets = placement.costs.device.targets
        self.joules = self.paging_s = 0.0
        graph = placement.graph
        self.lies_on = {s: placement.homes[s] for s in placement.starts_away}
        packed_on: dict[int, int] = {}
        for i, position in enumerate(placement.at):
            self._return(position.returns)
            for cost in position.unpacks:
                if cost.storage in packed_on:
                    self._read(cost.reserved_bytes, self.targets[packed_on.pop(cost.storage)])
            for s in graph.ops[i].writes:
                self.lies_on.pop(s, None)
            if (g := placement.updates.ends(i)) is not None:
                self._stream(g)
            for s in position.writes:
                self._write(s, position.targets.get(s, 0))
            for cost in position.packs:
                if cost.storage in position.packed_targets:
                    packed_on[cost.storage] = position.packed_targets[cost.storage]
                    self._written(cost.reserved_bytes, self.targets[packed_on[cost.storage]])

    def _return(self, storages: Iterable[int]) -> None:
        for s in storages:
            source = self.targets[self.lies_on.get(s, 0)]
            self._read(self.size[s], source)
            if source.capacity_bytes is not None and s not in self.x.host.copies:
                del self.lies_on[s]

    def _stream(self, g: int) -> None:
        """Count the transfers of an update in slices."""
        updates, graph = self.x.updates, self.x.graph
        streamed = updates.streamed[g] - set(updates.groups[g].temporaries)
        written = {s for s in updates.changed[g] & streamed if graph.storages[s].persistent} | updates.written[g]
        for s in streamed:
            self._read(self.size[s], self.targets[self.lies_on.get(s, 0)])
        for s in written:
            self.lies_on[s] = self.x.homes[s]
            self._written(self.size[s], self.targets[self.x.homes[s]])

    def _write(self, s: int, target: int) -> None:
        if s in self.lies_on:
            return
        self.lies_on[s] = target
        if self.x.graph.storages[s].persistent and not self.x.graph.writers[s]:
            return  # it is already there
        self._written(self.size[s], self.targets[target])

    def _read(self, nbytes: int, source: Flash) -> None:
        self.joules += nbytes * source.read_joules_per_byte
        self.paging_s += source.read_seconds(nbytes) if source.capacity_bytes is None else 0.0

    def _written(self, nbytes: int, target: Flash) -> None:
        self.joules += nbytes * (target.write_joules_per_byte + target.wear_joules_per_byte)
        self.paging_s += target.write_seconds(nbytes) if target.capacity_bytes is None else 0.0
