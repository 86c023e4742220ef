"""Followed storages: one record per storage of the program, found by the storage, never by a view of it."""

import ctypes
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from port_agent.backend.choose import shares_host_memory
from port_agent.guard import GuardedMemory, MappingKind, active_guard
from port_agent.intercept.residency.refusals import unsupported
from port_planner.base.code_pages import FileMapping, file_mappings
from port_planner.base.errors import program_line
from port_planner.base.process_memory import PAGE_BYTES
from port_planner.ir.device_kinds import CPU
from port_planner.torch_compat.modes import without_modes
from port_planner.torch_compat.tensors import is_zero

if TYPE_CHECKING:
    from port_agent.intercept.residency.pinned_pages import PinnedPage
    from port_agent.paging.pager import Slot

SMALLEST_BYTES = 16 << 10
"""Smaller storages stay resident: their transfer costs more than their memory is worth."""

SMALL_INTEGERS_BYTES = 32 << 10
"""Smaller int64 storages stay: C++ reads lengths, batch sizes and index shapes without the dispatcher."""

SMALLEST_MAPPING_BYTES = max(64 << 10, 4 * PAGE_BYTES)
"""Smaller file mappings stay: only whole pages inside them can be dropped."""

NEVER = 1 << 62
"""`next_use` of a storage that its trace does not use again."""

_NO_DEVICE = "meta"
"""Tensors on this device have no memory."""


untyped_storage = torch.Tensor.untyped_storage
_Untyped: Any = torch.UntypedStorage
data_ptr: Callable[[torch.UntypedStorage], int] = _Untyped.data_ptr
allocated_bytes: Callable[[torch.UntypedStorage], int] = _Untyped.nbytes
resize: Callable[[torch.UntypedStorage, int], object] = _Untyped.resize_
is_shared: Callable[[torch.UntypedStorage], bool] = _Untyped.is_shared
"""Torch's own methods, without those that `port_agent.intercept.patches.pointer_guards` puts in their place."""


def exposed(memory: torch.UntypedStorage) -> bool:
    """Return whether something else, such as numpy or another process, holds the address of a storage's memory for
    good.
    """
    return not memory.resizable() or is_shared(memory)


class Recomputation(Protocol):
    """How a dropped storage is recomputed (`port_agent.intercept.decisions.rematerialization.StorageRemat`)."""

    @property
    def sources(self) -> "tuple[Storage, ...]":
        """The followed storages that it reads."""

    @property
    def workspace_bytes(self) -> int:
        """What the operator takes besides operands and result."""

    def possible(self, storage: "Storage") -> bool:
        """Return whether its sources are unchanged and will exist when `storage` is needed next."""

    def kept_for(self, storage: "Storage") -> "list[Storage]":
        """Return the sources that the program itself does not need as long as `storage`."""

    def take_hold(self, storage: "Storage") -> tuple[torch.UntypedStorage, ...]:
        """Return strong references to its sources, which then remember the dependent storage."""

    @property
    def writes(self) -> int:
        """The count of writes without operators when the storage was made (`Backing.seal`)."""

    def unwritten(self) -> bool:
        """Return whether no source was written without operators since the storage was made."""

    def run(self) -> torch.UntypedStorage:
        """Return the recomputed contents."""


class Moving(Protocol):
    """A transfer of a storage, or of a part of one, in progress."""

    @property
    def write(self) -> bool:
        """Whether its contents are written to its page."""

    def done(self) -> bool:
        """Return whether it has ended."""

    def join(self) -> None:
        """Return when it has ended. Raises its failure."""


@dataclass(frozen=True, slots=True)
class GuardedPage:
    """The page of a block of guarded memory, which knows its place itself."""

    address: int


@dataclass(slots=True)
class HostPage:
    """The page of a device's storage: a block of the host's memory."""

    block: torch.UntypedStorage
    nbytes: int
    checksum: torch.Tensor | None = None
    """Checksum of the device's bytes when they were written to the block; on the device."""


class LastUse(Protocol):
    """A place in a trace at which a storage was used, and what happened to it until its next use."""

    def left(self) -> None:
        """Record that it had to be written and evicted before it was needed again."""

    def stayed(self) -> None:
        """Record that it was still resident when it was needed again."""


class Storage:
    """The state of one storage of the program. Bytes are of the storage, whatever its views cover."""

    __slots__ = (
        "__weakref__",
        "beside_bytes",
        "birth",
        "block_offset",
        "borrowed",
        "clean",
        "dependents",
        "hold",
        "key",
        "last_use",
        "left_at",
        "line",
        "mapped",
        "nbytes",
        "next_use",
        "number",
        "order",
        "page",
        "pins",
        "ref",
        "remat",
        "resident",
        "table",
        "transfer",
        "version",
        "watched",
    )

    def __init__(
        self,
        table: "StorageTable",
        ref: "weakref.ref[torch.UntypedStorage]",
        key: int,
        nbytes: int,
        number: int,
        *,
        mapped: bool,
    ) -> None:
        self.ref, self.key, self.nbytes, self.mapped = ref, key, nbytes, mapped
        self.table = table
        """Table of the storage's pool: the host's, or a device's."""
        self.number = number
        """Identity for the life of the process; `key` is reused after the storage's death."""
        self.resident = True
        """Whether the storage's memory is allocated, filled or being filled; for a mapped one, its pages were read."""
        self.clean = False
        """The page (or the mapped file) holds the same bytes as the storage; for guarded memory, as far as known."""
        self.page: Slot | GuardedPage | HostPage | PinnedPage | None = None
        self.line = ""
        """The program's line that made it; known for a device's storages alone."""
        self.transfer: Moving | None = None
        """A read or write of it in progress."""
        self.version = 0
        """Counts writes, to show whether what was computed from it can be recomputed."""
        self.pins = 0
        self.borrowed = 0
        """Number of pins that belong to numpy's arrays over its memory."""
        self.beside_bytes = 0
        """For a mapping in guarded memory: bytes before and after its whole pages, which are in no block."""
        self.block_offset = 0
        """Offset of its block of guarded memory from its own start, in bytes: a mapping's block has whole pages."""
        self.watched = False
        """For a mapped one: a pointer to it was handed out, so its pages show whether it was written."""
        self.last_use = 0
        self.next_use: int | None = None
        self.left_at: LastUse | None = None
        """Last use of the storage by the program, unless it was evicted since."""
        self.order = 0
        """Counts touches; entries of the eviction queue with an older count are stale."""
        self.birth: tuple[int, int, int] | None = None
        """Segment, position and output that made it."""
        self.remat: Recomputation | None = None
        self.hold: tuple[torch.UntypedStorage, ...] = ()
        """While dropped: the storages from which it will be recomputed, kept alive."""
        self.dependents: weakref.WeakSet[Storage] | None = None
        """Dropped storages that will be recomputed from this one, and must be before it changes."""

    @property
    def awaited_at(self) -> int:
        """The clock at which a dropped storage that depends on this one is needed; NEVER if there is none."""
        away = (d.next_use for d in self.dependents or () if not d.resident)
        return min((clock for clock in away if clock is not None), default=NEVER)

    @property
    def in_file(self) -> bool:
        """Whether the storage is a mapping that equals its file, so that touching it brings its pages in."""
        return self.mapped and self.clean and self.page is None

    @property
    def reading(self) -> bool:
        return self.transfer is not None and not self.transfer.write

    @property
    def writing(self) -> bool:
        return self.transfer is not None and self.transfer.write


class StorageTable:
    """The followed storages of one pool. `resident_bytes` counts those whose memory is allocated.

    Those of a device are found by the host's table, too, which numbers them. Storages may die in any thread at any
    time: their end is queued and handled at the next `reclaim_dead`.
    """

    def __init__(
        self, smallest_bytes: int, guard: GuardedMemory | None = None, *, host: "StorageTable | None" = None
    ) -> None:
        """`guard`: set if storages are in guarded memory. `host`: the host's table, for a device's."""
        self.smallest_bytes, self._guard = smallest_bytes, guard
        self._host = self if host is None else host
        self.devices: dict[torch.device, StorageTable] = {}
        """Tables of devices whose memory has a budget, only in the host's table."""
        self._bound_device: Callable[[torch.device], None] | None = None
        self._least_bytes = smallest_bytes
        """Smallest storage of all pools that is tracked, in bytes."""
        self._met = 0
        self.resident_bytes = 0
        self.mapped_bytes = 0
        """Resident bytes that are pages of files, not the allocator's."""
        self.peak_bytes = 0
        self._by_key: dict[int, Storage] = {} if host is None else host._by_key
        self._by_number: dict[int, Storage] = {} if host is None else host._by_number
        self.dead: deque[Storage] = deque()
        """Storages that died since the last `reclaim_dead`."""
        self._mappings = FileMappings()
        self.elsewhere: set[str] = set()
        """Kinds of devices other than the CPU on which storages were seen: these are neither counted nor moved."""

    def __iter__(self) -> Iterator[Storage]:
        return iter([storage for storage in list(self._by_key.values()) if storage.table is self])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def host(self) -> "StorageTable":
        """The host's table, which meets all storages."""
        return self._host

    @property
    def met(self) -> int:
        """Storages met so far in all pools: the number that the next one gets."""
        return self._host._met

    def expect_devices(self, bound_device: Callable[[torch.device], None]) -> None:
        """Call `bound_device` with each device on which a storage is met for the first time: its
        memory is to have a budget.
        """
        self._bound_device, self._least_bytes = bound_device, 0

    def add_device(self, device: torch.device, smallest_bytes: int) -> "StorageTable":
        """Follow storages of a device, too, from `smallest_bytes` on; return their table."""
        made = StorageTable(smallest_bytes, host=self)
        self.devices[device] = made
        self._least_bytes = min(self.smallest_bytes, smallest_bytes)
        return made

    def known(self, tensor: torch.Tensor) -> Storage | None:
        """Return the record of a tensor's storage if there is one; a sparse tensor has none."""
        return self._by_key.get(id(untyped_storage(tensor))) if tensor.layout is torch.strided else None

    def known_storage(self, storage: torch.UntypedStorage) -> Storage | None:
        """Return the record of a storage if there is one."""
        return self._by_key.get(id(storage))

    def numbered(self, number: int) -> Storage | None:
        """Return the living storage of that number."""
        return self._by_number.get(number)

    def of(self, tensor: torch.Tensor) -> Storage | None:
        """Return the record of a tensor's storage, created for a new one; None if it is not followed."""
        storage = untyped_storage(tensor)
        found = self._by_key.get(id(storage))
        if found is None:
            return self._meet(tensor, storage)
        return found

    def of_storage(self, storage: torch.UntypedStorage) -> Storage | None:
        """Return the record of a storage, created for a new one; None if it is not followed."""
        return self._by_key.get(id(storage)) or self._meet_storage(storage)

    def _meet(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Storage | None:
        nbytes = allocated_bytes(storage)
        if nbytes < self._least_bytes or (nbytes < SMALL_INTEGERS_BYTES and tensor.dtype is torch.int64):
            return None
        return None if is_zero(tensor) else self._meet_storage(storage)

    def _meet_storage(self, storage: torch.UntypedStorage) -> Storage | None:
        nbytes = allocated_bytes(storage)
        if nbytes < self._least_bytes:
            return None
        if storage.device.type != CPU:
            return self._meet_on_device(storage, nbytes)
        if nbytes < self.smallest_bytes or is_shared(storage) or self._fills_from_a_device(storage):
            return None
        if self._guard is not None and self._guard.usable_bytes(data_ptr(storage)):
            return self._add(storage, nbytes)
        if storage.resizable():
            return self._add(storage, nbytes) if self._guard is None else self._adopt(self._guard, storage, nbytes)
        if nbytes < SMALLEST_MAPPING_BYTES or not self._mappings.private(data_ptr(storage), nbytes):
            return None
        if self._guard is None:
            return self._add(storage, nbytes, mapped=True)
        return self._watch(self._guard, storage, nbytes)

    def _adopt(self, guard: GuardedMemory, storage: torch.UntypedStorage, nbytes: int) -> Storage | None:
        """Let guarded memory take over the tensors that torch allocated before it began."""
        if not guard.adopts or nbytes < SMALLEST_MAPPING_BYTES or _is_pinned(storage):
            return None
        if not guard.adopt(data_ptr(storage), nbytes):
            return None
        made = self._add(storage, nbytes)
        start, page_bytes = whole_pages(storage)
        made.block_offset, made.beside_bytes = start - data_ptr(storage), nbytes - page_bytes
        return made

    def _watch(self, guard: GuardedMemory, storage: torch.UntypedStorage, nbytes: int) -> Storage | None:
        """Make guarded memory watch whether a mapping still equals its file."""
        start, page_bytes = whole_pages(storage)
        kind = guard.watch(start, page_bytes)
        if kind is MappingKind.NONE:
            return None
        made = self._add(storage, nbytes, mapped=kind is MappingKind.FILE_PAGES)
        made.block_offset, made.beside_bytes = start - data_ptr(storage), nbytes - page_bytes
        return made

    def _fills_from_a_device(self, storage: torch.UntypedStorage) -> bool:
        """Return whether memory is pinned, which copies from a device may still be filling when
        their operator has ended.
        """
        return (self._bound_device is not None or bool(self.elsewhere)) and _is_pinned(storage)

    def _meet_on_device(self, storage: torch.UntypedStorage, nbytes: int) -> Storage | None:
        device = storage.device
        if device not in self.devices and device.type != _NO_DEVICE and self._bound_device is not None:
            self._bound_device(device)
        pool = self.devices.get(device)
        if pool is None:
            self._meet_device(device.type)
        if pool is None or nbytes < pool.smallest_bytes or not storage.resizable():
            return None
        made = pool._add(storage, nbytes)
        made.line = program_line()
        return made

    def _meet_device(self, kind: str) -> None:
        """Record a device; raises UnsupportedError for one that takes the budget's memory without being counted."""
        if kind in self.elsewhere or kind == _NO_DEVICE:
            return
        self.elsewhere.add(kind)
        if shares_host_memory(kind):
            raise unsupported(
                f"tensors on {kind} take the host's memory, which the budget limits, but cannot be moved",
                f"give --ram SIZE instead, which both share, plan the training with `port-agent plan --device {kind} --ram SIZE`, or run the "
                "program on the CPU",
            )

    def _add(self, storage: torch.UntypedStorage, nbytes: int, *, mapped: bool = False) -> Storage:
        key = id(storage)

        def died(_: object) -> None:
            if self._by_key.get(key) is made:
                del self._by_key[key]
            self._by_number.pop(made.number, None)
            self.dead.append(made)

        made = Storage(self, weakref.ref(storage, died), key, nbytes, self.met, mapped=mapped)
        made.clean = mapped and not mapping_written(storage)
        made.resident = not made.clean
        self._host._met += 1
        self._by_key[key] = made
        self._by_number[made.number] = made
        if made.resident:
            self.came(made)
        return made

    def came(self, storage: Storage) -> None:
        """Count the memory of a storage that is resident from now on."""
        self.resident_bytes += storage.nbytes
        self.mapped_bytes += storage.nbytes * storage.mapped
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def left_file(self, storage: Storage) -> None:
        """Record that a mapped storage is memory of the process from now on, and resident."""
        if storage.resident:
            self.went(storage)
        storage.mapped, storage.clean, storage.resident = False, False, True
        self.came(storage)

    def went(self, storage: Storage) -> None:
        """Stop counting the memory of a storage."""
        self.resident_bytes -= storage.nbytes
        self.mapped_bytes -= storage.nbytes * storage.mapped

    def reclaim_dead(self) -> Iterator[Storage]:
        """Yield storages that died since the last call, already subtracted from the count."""
        while self.dead:
            gone = self.dead.popleft()
            if gone.resident:
                self.went(gone)
            yield gone

    def resized(self, storage: Storage) -> bool:
        """Record that an operator may have resized a resident storage; return whether it did."""
        memory = storage.ref()
        nbytes = storage.nbytes if memory is None else allocated_bytes(memory)
        if nbytes == storage.nbytes:
            return False
        self.went(storage)
        storage.nbytes = nbytes
        self.came(storage)
        return True

    def forget(self) -> None:
        """Drop every record."""
        self._by_key.clear()
        self._by_number.clear()
        self.dead.clear()


def _is_pinned(storage: torch.UntypedStorage) -> bool:
    """Return whether a device may copy from or to a storage by the physical addresses of its pages."""
    with without_modes():
        return bool(torch.empty(0, dtype=torch.uint8, device=CPU).set_(storage).is_pinned())


class FileMappings:
    """Private file mappings of this process: weights that safetensors or torch.load(mmap=True) mapped."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def private(self, address: int, nbytes: int) -> bool:
        """Return whether the bytes at `address` lie in one private mapping of a file."""
        if sys.platform != "linux":
            return False
        known = self._around(address, nbytes)
        if known is None or not _is_mapped(*known):
            self._ranges = [(part.start, part.stop) for part in private_file_mappings()]
        return self._around(address, nbytes) is not None

    def _around(self, address: int, nbytes: int) -> tuple[int, int] | None:
        return next(
            ((start, stop) for start, stop in self._ranges if start <= address and address + nbytes <= stop), None
        )


def _is_mapped(start: int, stop: int) -> bool:
    """Return whether a file is mapped from `start` to `stop` now; after a mapping is gone, anything may be at its
    address.

    This takes a hundredth of the time of listing all mappings. False if /proc is not readable.
    """
    return os.path.lexists(f"/proc/self/map_files/{start:x}-{stop:x}")


def private_file_mappings() -> Iterator[FileMapping]:
    """Yield this process's private mappings of files."""
    return (one for one in file_mappings(Path("/proc/self/maps").read_text()) if not one.shared)


_MADV_WILLNEED = 3
_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22
"""Linux 5.14; on older kernels the pages come in at first touch."""
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def whole_pages(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return the address of the whole pages of a storage, and their bytes."""
    address = data_ptr(storage)
    start = -(-address // PAGE_BYTES) * PAGE_BYTES
    return start, (address + allocated_bytes(storage)) // PAGE_BYTES * PAGE_BYTES - start


_PAGEMAP_ENTRY_BYTES = 8
_PAGEMAP_PRESENT, _PAGEMAP_SWAPPED, _PAGEMAP_OF_FILE = 1 << 63, 1 << 62, 1 << 61
"""Bits of an entry of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst)."""


def mapping_written(storage: torch.UntypedStorage) -> bool:
    """Return whether whole pages of a private file mapping were written, and so belong to the process.

    True if the kernel does not report it (no CONFIG_PROC_PAGE_MONITOR).
    """
    start, nbytes = whole_pages(storage)
    guard = active_guard()
    return _pages_written(start, nbytes) if guard is None else not guard.is_of_file(start)


def _pages_written(start: int, nbytes: int) -> bool:
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            pagemap.seek(start // PAGE_BYTES * _PAGEMAP_ENTRY_BYTES)
            entries = np.frombuffer(pagemap.read(nbytes // PAGE_BYTES * _PAGEMAP_ENTRY_BYTES), np.uint64)
    except FileNotFoundError:
        return True
    there = (entries & np.uint64(_PAGEMAP_PRESENT | _PAGEMAP_SWAPPED)) != 0
    return bool((there & ((entries & np.uint64(_PAGEMAP_OF_FILE)) == 0)).any())


def drop_mapping(storage: torch.UntypedStorage) -> None:
    """Release the whole pages of a mapped storage; unwritten ones come back from the file on access.

    Guarded memory pages written ones out.
    """
    guard = active_guard()
    if guard is None:
        _madvise(*whole_pages(storage), _MADV_DONTNEED)
    else:
        guard.evict(whole_pages(storage)[0])


def populate_mapping(storage: torch.UntypedStorage) -> None:
    """Bring in the pages of a mapped storage, in large reads instead of a fault each."""
    guard = active_guard()
    if guard is None:
        _madvise(*whole_pages(storage), _MADV_POPULATE_READ)
    else:
        guard.bring(whole_pages(storage)[0])


def read_mapping_ahead(storage: torch.UntypedStorage) -> None:
    """Read all pages of a mapped storage ahead into the page cache, without waiting and without process memory."""
    _madvise(*whole_pages(storage), _MADV_WILLNEED)


def read_ahead(tensor: torch.Tensor) -> None:
    """Read a part of a mapped file ahead into the page cache, without waiting and without process memory."""
    start = address_of(tensor) // PAGE_BYTES * PAGE_BYTES
    _madvise(start, address_of(tensor) + span(tensor) * tensor.element_size() - start, _MADV_WILLNEED)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element, without recording that its pointer was handed out."""
    return data_ptr(untyped_storage(tensor)) + int(tensor.storage_offset()) * tensor.element_size()


def span(tensor: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first to its last in memory."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements += (int(size) - 1) * int(stride)
    return elements
