"""Whole storages of a step on their way to flash and back; where each of them lies there."""

from collections.abc import Sequence
from pathlib import Path

import torch

from agent.backend.base import Event
from agent.backend.staging import Staging
from agent.train.checkpoint import StateStore
from agent.train.pager import Pager, Slot, Transfer, unnamed_page_file
from agent.train.step_values import StepValues
from planner.ir.direct_io import padded
from planner.ir.errors import PortError
from planner.ir.lowering.packables import number_bytes
from planner.ir.program import Code, Program


class StepPaging:
    """The reads and writes of one program.

    Persistent storages live in `store`, temporaries in `scratch`, one page file per paging target. Raises PortError where the
    program pages to a target that has none.
    """

    def __init__(
        self, program: Program, values: StepValues, store: StateStore | None, pager: Pager, scratch: Sequence["Scratch"]
    ) -> None:
        self.program, self.storages, self.values = program, program.graph.storages, values
        self.store, self.pager, self.scratch = store, pager, scratch
        self._reads: dict[int, tuple[Transfer, torch.Tensor]] = {}
        self._writes: dict[int, Transfer] = {}
        self._lies_on: dict[int, int] = {}
        self._held: dict[int, torch.Tensor] = {}
        """A device's bytes that are being written to files: there until the program says so, as it was planned."""
        self._places = dict(program.host_places)
        self._leaving: dict[int, tuple[torch.Tensor, Event]] = {}
        self._arriving: dict[int, tuple[torch.Tensor, Event]] = {}
        """Pages on their way to and from the host's memory: the device's bytes, and when the copy is done."""
        self._item_bytes = number_bytes(program.graph)
        self._reserve()

    def _reserve(self) -> None:
        """Take the page file's space now: a full disk shows before the first step, not in the middle of one."""
        writes = {(i.index, i.target) for i in self.program.instructions if i.code is Code.WRITE}
        for s, target in sorted(writes):
            if target in self.program.memory_targets:
                self._page(s)
            elif target >= len(self.scratch):
                raise PortError(
                    f"this plan pages to {target + 1} directories, {len(self.scratch)} were given; give a page directory for "
                    "each paging target that it was planned for"
                )
            elif not self.storages[s].persistent:
                self._scratch_slot(s, target)

    def _staging(self) -> Staging:
        if self.pager.staging is None:
            raise PortError(
                "this plan pages to the host's memory, beside a device with its own; the CPU has no other: plan again"
            )
        return self.pager.staging

    def _page(self, s: int) -> torch.Tensor:
        """Return the page of a storage in the host's memory."""
        place = self._places[s]
        return self._staging().pages(self.program.host_bytes)[place : place + self.storages[s].nbytes]

    def _scratch_slot(self, s: int, target: int) -> Slot:
        return self.scratch[target].slot(s, self.storages[s].nbytes, self._item_bytes.get(s, 0))

    def slot(self, s: int) -> Slot:
        """Return where a storage's present contents lie on flash."""
        if self.storages[s].persistent:
            return self._store().slot(self.storages[s].key)
        return self._scratch_slot(s, self._lies_on.get(s, 0))

    def target(self, s: int, number: int = 0) -> Slot:
        """Return where a storage's new contents go on the paging target of this number."""
        if self.storages[s].persistent:
            return self._store().working_slot(self.storages[s].key)
        return self._scratch_slot(s, number)

    def _store(self) -> StateStore:
        if self.store is None:
            raise PortError("this plan keeps weights on flash, but no state directory was given; pass --page-dir")
        return self.store

    def write(self, s: int, target: int = 0) -> None:
        """Begin to write a resident storage to a paging target; the transfer holds its memory.

        Raises GraphChangedError if it is short.
        """
        contents = self.values.whole(s)
        self.check(s, contents)
        self._lies_on[s] = target
        if target in self.program.memory_targets:
            backend = self._staging().backend
            self._leaving[s] = contents, backend.copy(self._page(s), contents, backend.reached())
            return
        self._writes[s] = self.pager.send(self.target(s, target), contents)
        if not contents.is_cpu:
            self._held[s] = contents

    def check(self, s: int, contents: torch.Tensor) -> None:
        """Raise NonFiniteError where these bytes of a persistent storage are none to go on with."""
        if self.storages[s].persistent:
            self._store().check(self.storages[s].key, contents)

    def finish_write(self, s: int) -> None:
        """Wait until a storage is written, if it is being written; to the host's memory, only what is computed then waits."""
        if s in self._leaving:
            contents, copied = self._leaving.pop(s)
            self._staging().backend.wait(copied)
            del contents
            return
        if s in self._writes:  # else there was no step before, or someone waited meanwhile
            self.pager.wait(self._writes[s])
            del self._writes[s]
            self._held.pop(s, None)

    def read(self, s: int) -> None:
        """Begin to read a storage back."""
        target = self.values.allocate(s)
        if self._lies_on.get(s, 0) in self.program.memory_targets:
            backend = self._staging().backend
            self._arriving[s] = target, backend.copy(target, self._page(s), backend.reached())
            return
        self._reads[s] = self.pager.receive(self.slot(s), target), target

    def land(self, s: int) -> None:
        """Wait until a storage is read, and make it resident."""
        if s in self._arriving:
            self.values.base[s], copied = self._arriving.pop(s)
            self._staging().backend.wait(copied)
            return
        transfer, target = self._reads.pop(s)
        self.pager.wait(transfer)
        self.pager.arrived(transfer)
        self.values.base[s] = target

    def take_writes(self) -> None:
        """Take over the writes that the step before left under way: this program waits for them."""
        if self.store is not None:
            keys = {self.storages[s].key: s for s in self.program.carried}
            under_way = self.store.under_way
            self._writes |= {keys[k]: under_way.pop(k) for k in keys.keys() & under_way.keys()}

    def leave_writes(self) -> None:
        """Leave the writes that the step does not wait for to the next one, or to the next commit."""
        if self._writes:
            self._store().under_way |= {self.storages[s].key: t for s, t in self._writes.items()}
            self._writes.clear()
            self._held.clear()

    def failed_write(self) -> Exception | None:
        """Return why a write failed, if one did.

        Then what was read after it is not corrupt but was never written.
        """
        for transfer in self._writes.values():
            transfer.finished.wait()
        return next((t.error for t in self._writes.values() if t.error is not None), None)

    def drop(self) -> bool:
        """Let every transfer under way end and forget it.

        Says whether a persistent storage could not be written.
        """
        for transfer in (*self._writes.values(), *(t for t, _ in self._reads.values())):
            transfer.finished.wait()
        for _, copied in (*self._leaving.values(), *self._arriving.values()):
            copied.synchronize()
        self._leaving.clear()
        self._held.clear()
        self._arriving.clear()
        lost = any(t.error is not None and self.storages[s].persistent for s, t in self._writes.items())
        self._writes.clear()
        self._reads.clear()
        return lost


class Scratch:
    """The page file of a step's temporaries in a directory; a slot per storage, reused on every step."""

    def __init__(self, directory: Path, *, packs: bool = False) -> None:
        """`packs`: floating-point numbers lie in it packed."""
        self.file, self.packs = unnamed_page_file(directory), packs
        self._slots: dict[int, Slot] = {}
        self._end = 0

    def slot(self, s: int, nbytes: int, item_bytes: int = 0) -> Slot:
        """Return the slot of a storage, of floating-point numbers of so many bytes if it is said."""
        if s not in self._slots:
            self._slots[s] = Slot(self.file, self._end, nbytes, item_bytes=item_bytes if self.packs else 0)
            self._end += padded(nbytes)
            self.file.reserve(self._end)
        return self._slots[s]

    def close(self) -> None:
        self.file.close()
