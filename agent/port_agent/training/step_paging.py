"""Whole storages of a step in transfer to and from flash, and the place of each there."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from port_agent.backend.base import Backend, Event
from port_agent.backend.staging import Staging
from port_agent.paging.pager import Pager, Slot, Transfer, unnamed_page_file
from port_agent.training.state.checkpoint import StateStore
from port_agent.training.step_values import StepValues
from port_planner.base.direct_io import padded
from port_planner.base.errors import PortError
from port_planner.ir.costs import Codec
from port_planner.ir.lowering.packables import number_bytes
from port_planner.ir.program import Code, Program

Wait = Callable[[], None]
"""Waits until something is done, or makes the device's later computation wait for it."""


class StepPaging:
    """The reads and writes of one program.

    Persistent storages are in `store`, temporaries in `scratch`, one page file per paging target. Raises PortError if
    the program pages to a target that does not exist.
    """

    def __init__(
        self,
        program: Program,
        values: StepValues,
        store: StateStore | None,
        pager: Pager,
        scratch: Sequence["Scratch"],
        newer: set[str] | None = None,
    ) -> None:
        """`newer`: keys of persistent storages of which the store has older contents; None: it may be any of them."""
        self.program, self.storages, self.values = program, program.graph.storages, values
        self.store, self.pager, self.scratch = store, pager, scratch
        self._changes = {s for op in program.graph.ops for s in op.writes}
        self._newer = newer
        self._reads: dict[int, tuple[Transfer, torch.Tensor]] = {}
        self._writes: dict[int, Transfer] = {}
        self._lies_on: dict[int, int] = {}
        self._held: dict[int, torch.Tensor] = {}
        """A device's bytes that are being written to files, kept until the program releases them as planned."""
        self._places = dict(program.host_places)
        self._leaving: dict[int, tuple[torch.Tensor, Event]] = {}
        self._arriving: dict[int, tuple[torch.Tensor, Event]] = {}
        """Pages in transfer to and from the host's memory: the device's bytes, and when the copy is done."""
        self._moving: dict[int, tuple[torch.Tensor, Wait]] = {}
        """Slices of an update in transfer: their memory, and a function that returns once
        they have arrived or failed.
        """
        self._numbers = itertools.count()
        self._item_bytes = number_bytes(program.graph)
        self._reserve()

    def _reserve(self) -> None:
        """Reserve the page file's space now, so that a full disk is noticed before the
        first step and not during one.
        """
        writes = {(i.index, i.target) for i in self.program.instructions if i.code is Code.WRITE}
        packed = {(i.index, i.target) for i in self.program.instructions if i.code is Code.WRITE_PACKED}
        furthest = max((d for _, d in writes | packed if d not in self.program.memory_targets), default=-1)
        if furthest >= len(self.scratch):
            raise PortError(
                f"this plan pages to {furthest + 1} directories, but {len(self.scratch)} were given; give a page "
                "directory for each paging target that it was planned for"
            )
        for entry, target in sorted(packed):
            self.packed_slot(entry, target)
        for s, target in sorted(writes):
            if target in self.program.memory_targets:
                self._page(s)  # for a persistent storage, its copy
            elif not self.storages[s].persistent:
                self._scratch_slot(s, target)

    def _staging(self) -> Staging:
        if self.pager.staging is None:
            raise PortError(
                "this plan pages from a device's own memory to the host's, but runs on the CPU; plan the job again"
            )
        return self.pager.staging

    def _page(self, s: int) -> torch.Tensor:
        """Return the page of a storage in the host's memory."""
        storage = self.storages[s]
        if storage.persistent:
            return self._staging().copies.copy_of(storage.key, storage.nbytes)
        place = self._places[s]
        return self._staging().pages(self.program.host_block_bytes)[place : place + storage.nbytes]

    def _backend(self) -> Backend:
        return self._staging().backend

    def _scratch_slot(self, s: int, target: int) -> Slot:
        return self.scratch[target].slot(s, self.storages[s].nbytes, self._item_bytes.get(s, 0))

    def packed_slot(self, entry: int, target: int) -> Slot:
        """Return the slot of entry `entry` of `Program.packings` on a paging target.

        The items of a bitmap are numbers if its storage contains numbers, so a page of them may be packed again.
        """
        cost = self.program.packings[entry]
        item_bytes = self._item_bytes.get(cost.storage, 0) if cost.codec is Codec.BITMAP else 0
        return self.scratch[target].packed_slot(cost.storage, cost.reserved_bytes, item_bytes)

    def slot(self, s: int) -> Slot:
        """Return the slot of a storage's current contents on flash."""
        if self.storages[s].persistent:
            return self._store().slot(self.storages[s].key)
        return self._scratch_slot(s, self._lies_on.get(s, 0))

    def target(self, s: int, number: int = 0) -> Slot:
        """Return the slot for a storage's new contents on paging target `number`."""
        if self.storages[s].persistent:
            return self._store().working_slot(self.storages[s].key)
        return self._scratch_slot(s, number)

    def _store(self) -> StateStore:
        if self.store is None:
            raise PortError("this plan keeps weights on flash, but no state directory was given; pass --page-dir")
        return self.store

    def write(self, s: int, target: int = 0) -> None:
        """Begin to write a resident storage to a paging target; the transfer holds its memory.

        Raises GraphChangedError if the storage is too short.
        """
        in_memory = target in self.program.memory_targets
        if not (self._must_be_copied(s) if in_memory else self._must_be_written(s)):
            return
        contents = self.values.whole(s)
        self._lies_on[s] = target
        if in_memory:
            backend = self._backend()
            self._leaving[s] = contents, backend.copy(self._page(s), contents, backend.reached())
            return
        self.check(s, contents)
        self._writes[s] = self.pager.send(self.target(s, target), contents)
        if not contents.is_cpu:
            self._held[s] = contents

    def _must_be_copied(self, s: int) -> bool:
        """Return whether the host lacks a storage's contents; it has a persistent one's from now on."""
        if not self.storages[s].persistent:
            return True
        current, key = self._staging().copies.current, self.storages[s].key
        if key in current and s not in self._changes:
            return False
        current.add(key)
        return True

    def _must_be_written(self, s: int) -> bool:
        """Return whether flash lacks a storage's contents; it has those of an unchanged storage from now on."""
        key = self.storages[s].key
        if self._newer is None or not self.storages[s].persistent or s in self._changes:
            return True
        if key not in self._newer:
            return False
        self._newer.discard(key)
        return True

    def check(self, s: int, contents: torch.Tensor) -> None:
        """Raise NonFiniteError if these bytes of a persistent storage are not finite."""
        if self.storages[s].persistent:
            self._store().check(self.storages[s].key, contents)

    def finish_write(self, s: int) -> None:
        """Wait until a storage is written, if a write is in progress; for the host's memory, only the
        device's computation waits.
        """
        if s in self._leaving:
            contents, copied = self._leaving.pop(s)
            self._backend().wait(copied)
            del contents
            return
        if s in self._writes:  # otherwise there was no step before, or it was waited for meanwhile
            self.pager.wait(self._writes[s])
            del self._writes[s]
            self._held.pop(s, None)

    def read(self, s: int) -> None:
        """Begin to read a storage back."""
        target = self.memory(s, self.storages[s].nbytes)
        if self._in_memory(s):
            backend = self._backend()
            self._arriving[s] = target, backend.copy(target, self._page(s), backend.reached())
            return
        self._reads[s] = self.pager.receive(self.slot(s), target), target

    def memory(self, s: int, nbytes: int) -> torch.Tensor:
        """Return memory on a storage's device for `nbytes` bytes that are read from its page."""
        staging = self.pager.staging
        there = staging is not None and self.storages[s].device == staging.backend.kind
        return staging.memory(nbytes) if staging is not None and there else self.values.allocate(s, nbytes)

    def land(self, s: int) -> None:
        """Wait until a storage is read, and make it resident."""
        if s in self._arriving:
            self.values.base[s], copied = self._arriving.pop(s)
            self._backend().wait(copied)
            return
        transfer, target = self._reads.pop(s)
        self.pager.wait(transfer)
        self.pager.arrived(transfer)
        self.values.base[s] = target

    def _in_memory(self, s: int) -> bool:
        return s in self.program.host_copies or self._lies_on.get(s, 0) in self.program.memory_targets

    def slices_from(self, s: int) -> "Callable[[torch.Tensor, int], Wait]":
        """Return a function that begins to fill a buffer from an offset of a paged-out storage and returns a function
        to wait for it.

        The contents are the current ones, regardless of what `slices_to` writes meanwhile.
        """
        if self._in_memory(s):
            page, backend = self._page(s), self._backend()

            def copy_in(into: torch.Tensor, start: int) -> Wait:
                copied = backend.copy(into, page[start : start + into.numel()], backend.reached())
                return self._moving_slice(into, copied.synchronize, partial(backend.wait, copied))

            return copy_in
        source = self.slot(s)

        def read(into: torch.Tensor, start: int) -> Wait:
            transfer = self.pager.receive(source, into, start, into.numel())

            def wait() -> None:
                transfer.join()
                self.pager.arrived(transfer)

            return self._moving_slice(into, partial(_wait_all, transfer), wait)

        return read

    def slices_to(self, s: int) -> "Callable[[torch.Tensor, int], Wait]":
        """Return a function that begins to write bytes to a paged-out persistent storage at an offset and returns a
        function to wait for it.
        """
        if self._in_memory(s):
            page, backend = self._page(s), self._backend()
            self._staging().copies.current.add(self.storages[s].key)

            def copy_out(contents: torch.Tensor, start: int) -> Wait:
                copied = backend.copy(page[start : start + contents.numel()], contents, backend.reached())
                return self._moving_slice(contents, copied.synchronize, copied.synchronize)

            return copy_out
        target = self.target(s)

        def write(contents: torch.Tensor, start: int) -> Wait:
            self.check(s, contents)
            transfer = self.pager.send(target, contents, start)
            return self._moving_slice(contents, partial(_wait_all, transfer), transfer.join)

        return write

    def _moving_slice(self, memory: torch.Tensor, first_wait: Wait, wait: Wait) -> Wait:
        """Return `wait`, which keeps the memory until it is called.

        If the step is abandoned before that, `first_wait` is called.
        """
        number = next(self._numbers)
        self._moving[number] = memory, first_wait

        def waited() -> None:
            wait()
            self._moving.pop(number, None)

        return waited

    def host_copy(self, s: int) -> torch.Tensor | None:
        """Return the copy of a persistent storage in the host's memory, if it is current."""
        staging, storage = self.pager.staging, self.storages[s]
        copy = None if staging is None else staging.copies.present(storage.key)
        return None if copy is None else copy[: storage.nbytes]

    def take_writes(self) -> None:
        """Take over the writes that the previous step left in progress, so that this program waits for them."""
        if self.store is not None:
            keys = {self.storages[s].key: s for s in self.program.cross_step}
            pending = self.store.pending
            self._writes |= {keys[k]: pending.pop(k) for k in keys.keys() & pending.keys()}

    def leave_writes(self) -> None:
        """Leave the writes that the step does not wait for to the next one, or to the next commit.

        Copies in the host's memory are outdated if the step changed what is on the device.
        """
        if self.pager.staging is not None:
            changed = self._changes - self.program.starts_on_host
            self.pager.staging.copies.current -= {self.storages[s].key for s in changed}
        if self._writes:
            self._store().pending |= {self.storages[s].key: t for s, t in self._writes.items()}
            self._writes.clear()
            self._held.clear()

    def failed_write(self) -> Exception | None:
        """Return why a write failed; None if none failed.

        Contents read after a failure are not corrupt, but were never written.
        """
        for transfer in self._writes.values():
            transfer.finished.wait()
        return next((t.error for t in self._writes.values() if t.error is not None), None)

    def drop(self) -> bool:
        """Let every transfer in progress end, and discard it; return whether a persistent
        storage could not be written.
        """
        for transfer in (*self._writes.values(), *(t for t, _ in self._reads.values())):
            _wait_all(transfer)
        for _, copied in (*self._leaving.values(), *self._arriving.values()):
            copied.synchronize()
        for _, first_wait in self._moving.values():
            first_wait()
        self._moving.clear()
        self._leaving.clear()
        self._held.clear()
        self._arriving.clear()
        lost = any(t.error is not None and self.storages[s].persistent for s, t in self._writes.items())
        self._writes.clear()
        self._reads.clear()
        return lost


def _wait_all(transfer: Transfer) -> None:
    """Return once a transfer has ended in any way, and its contents are in place."""
    transfer.finished.wait()
    if transfer.landed is not None:
        transfer.landed.synchronize()


class Scratch:
    """The page file of a step's temporaries in a directory, with a slot per storage that is reused in every step."""

    def __init__(self, directory: Path, *, packs: bool = False) -> None:
        """`packs`: whether floating-point numbers in it are packed."""
        self.file, self.packs = unnamed_page_file(directory), packs
        self._slots: dict[int, Slot] = {}
        self._packed_slots: dict[tuple[int, int], Slot] = {}
        self._end = 0

    def slot(self, s: int, nbytes: int, item_bytes: int = 0) -> Slot:
        """Return the slot of a storage; `item_bytes`: the size of its floating-point numbers, if it has any."""
        return self._slots.get(s) or self._slots.setdefault(s, self._reserved(nbytes, item_bytes))

    def packed_slot(self, s: int, nbytes: int, item_bytes: int = 0) -> Slot:
        """Return the slot of a storage's packed forms; sizes have separate slots, because plans may differ in size."""
        known = self._packed_slots.get((s, nbytes))
        return known or self._packed_slots.setdefault((s, nbytes), self._reserved(nbytes, item_bytes))

    def _reserved(self, nbytes: int, item_bytes: int) -> Slot:
        slot = Slot(self.file, self._end, nbytes, item_bytes=item_bytes if self.packs else 0)
        self._end += padded(nbytes)
        self.file.reserve(self._end)
        return slot

    def close(self) -> None:
        self.file.close()
