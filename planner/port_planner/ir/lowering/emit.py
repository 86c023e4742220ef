"""The last pass of lowering: instructions in order.

It keeps a clock for compute and one for the page thread.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from port_planner.ir.costs import LINKS, Flash, PackingCost
from port_planner.ir.lowering.beside import beside_bytes
from port_planner.ir.lowering.placement import Due, Placement
from port_planner.ir.lowering.rematerialize import effective_operands
from port_planner.ir.program import Code, Instruction, Program

READ_MARGIN = 0.1
"""Share of its duration by which a read starts earlier than the measured bandwidth requires."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A write or a sliced update in progress.

    `nbytes` stay resident until `wait` ends, at `moment` at the earliest.
    """

    wait: Code
    index: int
    nbytes: int
    moment: float
    frees: tuple[int, ...] = ()


def emit(placement: Placement) -> Program:
    """Return the program of a placed plan, in the state in which it follows itself.

    The writes left by the previous step are still in progress.
    """
    alone = _Emitter(placement, ())
    alone.emit()
    left = alone.left_pending()
    if not left:
        return alone.program()
    following = _Emitter(placement, left)
    following.emit()
    return following.program()


class _Emitter:
    """Writes the instruction list and simulates its time.

    There is one compute thread and one page thread with a FIFO queue.

    Sliced updates continue after the compute thread, but their time counts as the compute thread's. `cross_step`:
    writes of the previous step that are not finished when this one starts; times count from that start.
    """

    def __init__(self, placement: Placement, cross_step: tuple[_Pending, ...]) -> None:
        self.x, self.updates = placement, placement.updates
        self.graph, self.costs, self.size = placement.graph, placement.costs, placement.size
        self.targets = placement.costs.device.targets
        self.put: list[tuple[Code, int, int, int]] = []
        """Arguments of `Instruction`, in order: most programs are lowered only for their figures."""
        self.clock = self.stall = self.recompute = 0.0
        self.packings: list[PackingCost] = []
        self.packed: dict[int, int] = {}
        """Storage -> its entry in `packings` while it is packed."""
        self.packed_on: dict[int, int] = {}
        """Storage -> the target that holds its packed form."""
        self.backlog = cross_step[-1].moment if cross_step else 0.0
        self.free_at = [self.backlog, *(0.0 for _ in LINKS[1:])]
        """Time at which all queued transfers of each link are done."""
        self.held = placement.need.copy()
        self.cross_step = cross_step
        self.pending = list(cross_step)
        self.pending_bytes = sum(p.nbytes for p in cross_step)
        self.updating = 0
        """The number of pending sliced updates."""
        self.done: dict[int, float] = {}
        self.next_read = 0
        self.read_bytes, self.written_to = 0, [0] * len(self.targets)
        self.io_joules = self.wear_joules = 0.0
        self.lies_on = {s: placement.homes[s] for s in placement.starts_away}
        """Storages whose current contents are already on a paging target, and the number of that target."""
        self.unchanged = {
            s for s, storage in enumerate(self.graph.storages) if storage.persistent and not self.graph.writers[s]
        }
        """Persistent storages that are unchanged on their target, except for changes by another graph, which are
        written once and waited for.
        """
        self.level = 0

    def emit(self) -> None:
        """Write the instructions of the step.

        At its end, only writes for which the next step can wait may be in progress.
        """
        x = self.x
        self.timeline: list[int] = []
        for i, position in enumerate(x.at):
            fullest = self._read_ahead(i)
            for s in position.returns:
                self._wait_read(s)
            for cost in position.unpacks:
                if cost.storage in self.packed_on:
                    self._wait_read_packed(cost.storage)
            self._make_free()
            for cost in position.unpacks:
                self._unpack(cost)
            fullest = max(fullest, self.level + self.pending_bytes)
            self.timeline.append(fullest + self.costs.device.base_bytes)
            if i in x.reruns:
                self._rerun(i)
            self._run(i)
            if not position.packs:
                self.level = int(x.after_need[i])
            g = self.updates.ends(i)
            later = self._stream(g, position.frees) if g is not None else ()
            for s in position.frees:
                if s not in later:
                    self._free(s)
            for cost in position.packs:
                self._pack(cost)
            self.level = int(x.after_need[i])
            for s in position.writes:
                self._write(s, position.targets.get(s, 0))
            for cost in position.packs:
                if cost.storage in position.packed_targets:
                    self._write_packed(cost, position.packed_targets[cost.storage])
        known = {p.index for p in self.cross_step}
        while not all(self._may_outlast(p) and (not known or p.index in known) for p in self.pending):
            self._wait_oldest()
        self._stall_until(self.free_at[0] - self.backlog if self.cross_step else self.clock)

    def _may_outlast(self, pending: _Pending) -> bool:
        s = pending.index
        return pending.wait is Code.WAIT_WRITE and s in self.x.starts_away and s not in self.x.host.copies

    def left_pending(self) -> tuple[_Pending, ...]:
        """Return the writes that are in progress at the end, with times relative to it."""
        return tuple(replace(p, moment=p.moment - self.clock) for p in self.pending)

    def program(self) -> Program:
        """Return the instructions and their costs."""
        x, graph, timeline = self.x, self.graph, self.timeline
        device = self.costs.device
        instructions = tuple(Instruction(*put) for put in self.put)
        op_seconds = sum(c.seconds for c in self.costs.ops)
        recomputed = [r for ops in x.reruns.values() for r, _ in ops]
        joules = sum(c.joules for c in self.costs.ops) + sum(self.costs.ops[r].joules for r in recomputed)
        joules += self.io_joules + sum(cost.joules for cost in self.packings)
        packing_seconds = sum(cost.seconds for cost in self.packings)
        joules += device.static_watts * self.clock
        peak_op = int(np.argmax(timeline)) if timeline else 0
        return Program(
            graph=graph, instructions=instructions, groups=tuple(x.updates.groups),
            slice_counts=tuple(sorted(x.updates.counts.items())),
            slice_written=tuple((g, tuple(sorted(s))) for g, s in sorted(x.updates.written.items()) if s),
            starts_on_flash=frozenset(x.starts_away) - x.host.copies,
            cross_step=frozenset(p.index for p in self.cross_step),
            replayed=frozenset(r for r in recomputed if graph.ops[r].random),
            peak_bytes=max(timeline, default=device.base_bytes), peak_op=peak_op,
            seconds=self.clock, compute_seconds=op_seconds + self.recompute + packing_seconds, stall_seconds=self.stall,
            joules=joules, recompute_seconds=self.recompute,
            read_bytes=self.read_bytes, written_to=tuple(self.written_to), wear_joules=self.wear_joules,
            packings=tuple(self.packings), packing_seconds=packing_seconds, timeline=tuple(timeline),
            memory_targets=frozenset(d for d, t in enumerate(self.targets) if t.capacity_bytes is not None),
            host_places=x.host.places, host_block_bytes=x.host.nbytes,
            starts_on_host=x.host.copies & x.starts_away, host_copies=x.host.copies,
            beside_bytes=beside_bytes(graph, self.costs, instructions, x.starts_away),
        )  # fmt: skip

    def _put(self, code: Code, index: int, target: int = 0) -> None:
        self.put.append((code, index, self.level + self.pending_bytes, target))

    def _make_free(self) -> None:
        limit = self.x.limit
        while self.pending and (
            (limit is not None and self.level + self.pending_bytes > limit) or self._oldest().moment <= self.clock
        ):
            self._wait_oldest()

    def _oldest(self) -> _Pending:
        """Return the operation in progress that finishes first; on one link, the one queued first."""
        return min(self.pending, key=lambda p: p.moment)

    def _wait_oldest(self) -> None:
        oldest = self._oldest()
        self.pending.remove(oldest)
        self._put(oldest.wait, oldest.index)
        self._stall_until(oldest.moment)
        self.pending_bytes -= oldest.nbytes
        self.updating -= oldest.wait is Code.WAIT_SLICED
        for s in oldest.frees:
            self._put(Code.FREE, s)

    def _wait(self, touched: Set[int], changed: Set[int]) -> None:
        """Wait for pending updates that the next instruction would disturb.

        Those change storages it touches, or touch storages it changes.
        """
        while self.updating and any(
            p.wait is Code.WAIT_SLICED
            and not (
                touched.isdisjoint(self.updates.changed[p.index]) and changed.isdisjoint(self.updates.touched[p.index])
            )
            for p in self.pending
        ):
            self._wait_oldest()

    def _free(self, s: int) -> None:
        self._wait(set(), {s})
        self._put(Code.FREE, s)

    def _stall_until(self, moment: float) -> None:
        if moment > self.clock:
            self.stall += moment - self.clock
            self.clock = moment

    def _source(self, s: int) -> Flash:
        return self.targets[self.lies_on.get(s, 0)]

    def _read_seconds(self, s: int) -> float:
        return self._source(s).read_seconds(self.size[s])

    def _book_read(self, s: int) -> None:
        self._count_read(self.size[s], self._source(s))

    def _count_read(self, nbytes: int, source: Flash) -> None:
        self.read_bytes += nbytes
        self.io_joules += nbytes * source.read_joules_per_byte

    def _book_write(self, s: int, target: int) -> None:
        self.lies_on[s] = target
        self._count_write(self.size[s], target)

    def _count_write(self, nbytes: int, target: int) -> None:
        self.written_to[target] += nbytes
        self.io_joules += nbytes * self.targets[target].write_joules_per_byte
        self.wear_joules += nbytes * self.targets[target].wear_joules_per_byte

    def _transfer(self, link: int, seconds: float) -> float:
        self.free_at[link] = max(self.free_at[link], self.clock) + seconds
        return self.free_at[link]

    def _read_ahead(self, i: int) -> int:
        """Request the reads that cannot wait for the next op, if they fit, and those that op `i` needs.

        One thread moves pages in the order of the requests, so a read goes before the writes that would delay it.
        Returns the resident bytes at the fullest moment.
        """
        x = self.x
        self.level = int(self.held[i])
        fullest = 0
        while self.next_read < len(x.reads):
            due = x.reads[self.next_read]
            if due.use > i and not (due.earliest <= i and self._late(i, due) and self._fits(i, due)):
                break
            self.next_read += 1
            self.held[i : due.use] += self._due_bytes(due)
            self.level = int(self.held[i])
            self._read_packed(due.packed) if due.packed is not None else self._read(due.storage)
            fullest = max(fullest, self.level + self.pending_bytes)
        return fullest

    def _due_bytes(self, due: Due) -> int:
        return self.size[due.storage] if due.packed is None else due.packed.reserved_bytes

    def _due_source(self, due: Due) -> Flash:
        return self._source(due.storage) if due.packed is None else self.targets[self.packed_on[due.storage]]

    def _late(self, i: int, due: Due) -> bool:
        """Return whether a read queued only after op `i` and its writes would finish too late."""
        x, source = self.x, self._due_source(due)
        link, span = source.link, source.read_seconds(self._due_bytes(due))
        after = self.clock + float(x.starts[i + 1] - x.starts[i])
        free = max(self.free_at[link], after)
        position = x.at[i]
        for s in position.writes:
            target = self.targets[position.targets.get(s, 0)]
            if target.link == link and s not in self.lies_on and s not in self.unchanged:
                free += target.write_seconds(self.size[s])
        for cost in position.packs if position.packed_targets else ():
            d = position.packed_targets.get(cost.storage)
            if d is not None and self.targets[d].link == link:
                free += self.targets[d].write_seconds(cost.reserved_bytes)
        wanted = self.clock + due.moment - float(x.starts[i])
        return free + (1 + READ_MARGIN) * span > wanted

    def _fits(self, i: int, due: Due) -> bool:
        """Return whether a read fits from op `i` to its use, beside the writes in progress."""
        x = self.x
        if x.limit is None:
            return True
        load = self.held[i : due.use] + self._due_bytes(due)
        if load.size and load.max() > x.limit:
            return False
        if self.pending:
            moments = self.clock + x.starts[i : due.use] - x.starts[i]
            by_moment = sorted(self.pending, key=lambda p: p.moment)
            done = np.array([p.moment for p in by_moment])
            left = np.cumsum([p.nbytes for p in reversed(by_moment)])[::-1]
            left = np.append(left, 0)
            load = load + left[np.searchsorted(done, moments, side="right")]
        return bool((load <= x.limit).all())

    def _make_free_to_read(self) -> None:
        limit = self.x.limit
        while self.pending and limit is not None and self.level + self.pending_bytes > limit:
            self._wait_oldest()

    def _read(self, s: int) -> None:
        self._make_free_to_read()
        self._wait(set(), {s})
        self._put(Code.READ, s)
        self.done[s] = self._transfer(self._source(s).link, self._read_seconds(s))
        self._book_read(s)
        if self._source(s).capacity_bytes is not None and s not in self.x.host.copies:
            del self.lies_on[s]  # its room is free for another once it is back

    def _wait_read(self, s: int) -> None:
        self._put(Code.WAIT_READ, s)
        self._stall_until(self.done.pop(s))

    def _write(self, s: int, target: int) -> None:
        if s in self.lies_on:
            self._free(s)
            return
        self._wait(set(), {s})
        if s in self.unchanged:
            self._put(Code.WRITE, s, target)
            self._put(Code.WAIT_WRITE, s)
            self.lies_on[s] = target
            return
        done = self._transfer(self.targets[target].link, self.targets[target].write_seconds(self.size[s]))
        self.pending.append(_Pending(Code.WAIT_WRITE, s, self.size[s], done))
        self.pending_bytes += self.size[s]
        self._book_write(s, target)
        self._put(Code.WRITE, s, target)

    def _pack(self, cost: PackingCost) -> None:
        self._wait({cost.storage}, {cost.storage})
        self.packed[cost.storage] = len(self.packings)
        self._put(Code.PACK, len(self.packings))
        self.packings.append(cost)
        self.clock += cost.pack_seconds

    def _unpack(self, cost: PackingCost) -> None:
        self._put(Code.UNPACK, self.packed.pop(cost.storage))
        self.clock += cost.unpack_seconds

    def _write_packed(self, cost: PackingCost, number: int) -> None:
        target, nbytes, entry = self.targets[number], cost.reserved_bytes, self.packed[cost.storage]
        done = self._transfer(target.link, target.write_seconds(nbytes))
        self.pending.append(_Pending(Code.WAIT_WRITE_PACKED, entry, nbytes, done))
        self.pending_bytes += nbytes
        self.packed_on[cost.storage] = number
        self._count_write(nbytes, number)
        self._put(Code.WRITE_PACKED, entry, number)

    def _read_packed(self, cost: PackingCost) -> None:
        self._make_free_to_read()
        source = self.targets[self.packed_on[cost.storage]]
        self.done[cost.storage] = self._transfer(source.link, source.read_seconds(cost.reserved_bytes))
        self._count_read(cost.reserved_bytes, source)
        self._put(Code.READ_PACKED, self.packed[cost.storage])

    def _wait_read_packed(self, s: int) -> None:
        del self.packed_on[s]
        self._put(Code.WAIT_READ_PACKED, self.packed[s])
        self._stall_until(self.done.pop(s))

    def _rerun(self, i: int) -> None:
        for r, done in self.x.reruns[i]:
            if self.updating:
                self._wait(set(effective_operands(self.graph, r)), set())
            self._put(Code.RERUN, r)
            seconds = self.costs.ops[r].seconds
            self.clock += seconds
            self.recompute += seconds
            for s in done:
                self._free(s)

    def _run(self, i: int) -> None:
        self.clock += self.costs.ops[i].seconds
        op = self.graph.ops[i]
        for s in op.writes:
            self.lies_on.pop(s, None)
        g = self.updates.group_at.get(i)
        if g is None:
            if self.updating:
                self._wait({*self.graph.reads[i], *self.graph.creates[i]}, set(op.writes))
            self._put(Code.RUN, i)
        elif i == self.updates.groups[g].last:
            self._wait(self.updates.touched[g], self.updates.changed[g])
            self._put(Code.SLICED, g)

    def _stream(self, g: int, frees: Sequence[int]) -> tuple[int, ...]:
        """Count the transfers of a sliced group that has started.

        Return those of `frees` that must wait for its end.
        """
        updates, group = self.updates, self.updates.groups[g]
        streamed = updates.streamed[g] - set(group.temporaries)
        begin = self.clock - sum(self.costs.ops[i].seconds for i in range(group.first, group.last + 1))
        written = {s for s in updates.changed[g] & streamed if self.graph.storages[s].persistent} | updates.written[g]
        links = {self._source(s).link for s in streamed} | {self.targets[self.x.homes[s]].link for s in written}
        for link in links:
            self.free_at[link] = max(self.free_at[link], begin)
        for s in streamed:
            self.free_at[self._source(s).link] += self._read_seconds(s)
            self._book_read(s)
        for s in written:
            target = self.targets[self.x.homes[s]]
            self.free_at[target.link] += target.write_seconds(self.size[s])
            self._book_write(s, self.x.homes[s])
        later = tuple(s for s in frees if s in updates.touched[g])
        nbytes = updates.resident_bytes(g) + sum(self.size[s] for s in later)
        moment = max(self.clock, *(self.free_at[link] for link in links)) if links else self.clock
        self.pending.append(_Pending(Code.WAIT_SLICED, g, nbytes, moment, later))
        self.updating += 1
        self.pending_bytes += nbytes
        return later
