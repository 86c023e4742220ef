"""Where the memory of evicted storages is kept, and how it moves: what the residency needs of either way.

`ResizedStorages` empties storages (`resize_(0)`) and keeps their pages itself; it works in any process, for accesses by
operators. `GuardedStorages` uses guarded memory, where addresses stay and whoever touches a paged-out block finds it
there. The residency's records are then advice, and a mistake costs time.
"""

import ctypes
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from port_agent.guard import GuardedMemory
from port_agent.intercept.residency.storages import (
    GuardedPage,
    Moving,
    Storage,
    StorageTable,
    data_ptr,
    exposed,
    is_shared,
    resize,
    whole_pages,
)
from port_agent.paging.page_space import PageSpace
from port_agent.paging.pager import PageError, Pager, PagerStats, Slot
from port_agent.system.mounts import worn_by_writing
from port_planner.base.process_memory import available_bytes

NAN_BYTE = 0xFF
"""All bits set is NaN in every IEEE format, and -1 in integers."""

_WRITES_BITS = 32
"""Bits for the number of a block's writes; a checksum stands above them."""

_STACK_BYTES = 1 << 20
"""Stack of the thread that moves blocks: the system's 8 MiB would count against RLIMIT_DATA."""


class Backing(Protocol):
    """One way to keep evicted storages. `memory` is the storage's own; mapped files are read and dropped elsewhere."""

    @property
    def guarded(self) -> bool:
        """Whether an access to paged-out memory brings it in; an access to memory without a page ends the program with
        an error.
        """

    @property
    def stats(self) -> PagerStats:
        """What was moved at the residency's request: how fast the medium is, and how long the program waited."""

    def totals(self) -> PagerStats:
        """Return everything that was moved."""

    def peak_bytes(self, table: StorageTable) -> int:
        """Return the peak of tensors, in bytes."""

    def stays(self, storage: Storage, memory: torch.UntypedStorage) -> bool:
        """Return whether a storage must not be evicted, because accesses without operators would not find it."""

    def read(self, storage: Storage, memory: torch.UntypedStorage) -> Moving:
        """Begin to read an evicted storage, and return the transfer."""

    def write(self, storage: Storage, memory: torch.UntypedStorage) -> Moving:
        """Begin to write a storage to its page, which is allocated if necessary.

        Raises PageError if there is no space.
        """

    def wait(self, moving: Moving) -> None:
        """Return when a transfer is done. Raises its failure, a PageError."""

    def leave(self, storage: Storage, memory: torch.UntypedStorage) -> None:
        """Release memory whose page is up to date."""

    def lose(self, storage: Storage, memory: torch.UntypedStorage) -> None:
        """Provide memory there that holds NaN: the contents cannot be read any more."""

    def written_past(self, storage: Storage, memory: torch.UntypedStorage) -> bool:
        """Return whether something other than an operator wrote a storage since its page was written,
        where nothing else tells.
        """

    def take_from_file(self, storage: Storage, memory: torch.UntypedStorage) -> bool:
        """Turn a mapping that is about to be written into ordinary memory; return whether it is now."""

    def seal(self, storage: Storage, memory: torch.UntypedStorage) -> int | None:
        """Return a token that shows whether a storage is written without operators from now on; None if that is
        impossible.
        """

    def unwritten(self, storage: Storage, memory: torch.UntypedStorage, writes: int) -> bool:
        """Return whether a storage was not written without operators since `seal` returned `writes`."""

    def drop(self, storage: Storage, memory: torch.UntypedStorage, writes: int) -> bool:
        """Discard memory that will be recomputed; return False if it was written since `seal` returned `writes`, or was
        evicted.
        """

    def refill(self, storage: Storage, memory: torch.UntypedStorage, made: torch.UntypedStorage) -> None:
        """Fill dropped memory with the contents of `made`, which is not used any more."""

    def bear_away(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a new tensor that starts paged out without contents: these are written to its page in parts."""

    def take_page(self, storage: Storage) -> None:
        """Allocate a page for a storage that started paged out. Raises PageError."""

    def give_page_back(self, storage: Storage) -> None:
        """Release a storage's page, because its size changed or the storage died."""

    def read_part(
        self, storage: Storage, memory: torch.UntypedStorage, into: torch.Tensor, start: int, nbytes: int
    ) -> Moving:
        """Begin to read `nbytes` from byte `start` of a page, whole chunks or up to the end,
        into the bytes of a tensor.
        """

    def write_part(
        self, storage: Storage, memory: torch.UntypedStorage, source: torch.Tensor, start: int, nbytes: int
    ) -> Moving:
        """Begin to write to a page, from the first bytes of a tensor; otherwise as `read_part`."""

    def release(self) -> None:
        """Return to the system what evicted storages held."""

    def free_bytes(self) -> float:
        """Return how much memory there is for what is away, at most."""

    def away_bytes(self, table: StorageTable) -> int:
        """Return the bytes that `Residency.restore` brings in."""

    def discard(self) -> bool:
        """Return whether storages that may be evicted have to be freed, unwritten, at the end of the process."""

    def about_to_fork(self) -> None:
        """Prepare for a child process."""

    def forked(self) -> None:
        """Continue in the parent."""

    def become_child(self) -> None:
        """Continue in the child."""

    def close(self) -> None:
        """End the thread that moves storages, and discard the pages."""


def _wait(moving: Moving, stats: PagerStats) -> None:
    begin = time.perf_counter()
    try:
        moving.join()
    finally:
        stats.stall_seconds += time.perf_counter() - begin


def _address(tensor: torch.Tensor) -> int:
    return data_ptr(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()


def _block_of(storage: Storage, memory: torch.UntypedStorage) -> int:
    """Return the address of the guarded block that holds a storage."""
    return data_ptr(memory) + storage.block_offset


def _sum_beside_pages(storage: Storage, memory: torch.UntypedStorage) -> int:
    """Return a checksum of the bytes of a mapping before and after its whole pages, which no block covers; 0 for other
    storages.
    """
    if not storage.beside_bytes:
        return 0
    address, (start, page_bytes) = data_ptr(memory), whole_pages(memory)
    before = ctypes.string_at(address, start - address)
    after = ctypes.string_at(start + page_bytes, address + storage.nbytes - start - page_bytes)
    return zlib.crc32(after, zlib.crc32(before))


class ResizedStorages:
    """Evicted storages are empty; their pages are in a page file of this process."""

    guarded = False

    def __init__(self, pages: PageSpace, pager: Pager) -> None:
        self._pages, self._pager = pages, pager

    @property
    def stats(self) -> PagerStats:
        return self._pager.stats

    def totals(self) -> PagerStats:
        return self._pager.stats

    def peak_bytes(self, table: StorageTable) -> int:
        return table.peak_bytes

    def stays(self, storage: Storage, memory: torch.UntypedStorage) -> bool:
        return not storage.mapped and exposed(memory)

    def read(self, storage: Storage, memory: torch.UntypedStorage) -> Moving:
        slot = _slot(storage)
        if not storage.mapped:
            resize(memory, storage.nbytes)
        return self._pager.read(slot, data_ptr(memory), memory)

    def write(self, storage: Storage, memory: torch.UntypedStorage) -> Moving:
        if storage.page is None or not self._pages.writable(_slot(storage)):
            inherited, storage.page = storage.page, self._pages.take(storage.nbytes)
            if isinstance(inherited, Slot):
                self._pages.give_back(inherited)
        return self._pager.write(_slot(storage), data_ptr(memory), memory)

    def wait(self, moving: Moving) -> None:
        _wait(moving, self.stats)

    def leave(self, storage: Storage, memory: torch.UntypedStorage) -> None:
        resize(memory, 0)

    def lose(self, storage: Storage, memory: torch.UntypedStorage) -> None:
        if not storage.mapped:
            resize(memory, storage.nbytes)
        ctypes.memset(data_ptr(memory), NAN_BYTE, storage.nbytes)

    def written_past(self, storage: Storage, memory: torch.UntypedStorage) -> bool:
        return False

    def take_from_file(self, storage: Storage, memory: torch.UntypedStorage) -> bool:
        return False

    def seal(self, storage: Storage, memory: torch.UntypedStorage) -> int | None:
        return None if storage.watched or (not storage.mapped and exposed(memory)) else 0

    def unwritten(self, storage: Storage, memory: torch.UntypedStorage, writes: int) -> bool:
        return True

    def drop(self, storage: Storage, memory: torch.UntypedStorage, writes: int) -> bool:
        resize(memory, 0)
        return True

    def refill(self, storage: Storage, memory: torch.UntypedStorage, made: torch.UntypedStorage) -> None:
        resize(memory, storage.nbytes)
        ctypes.memmove(data_ptr(memory), data_ptr(made), storage.nbytes)

    def bear_away(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    def take_page(self, storage: Storage) -> None:
        storage.page = self._pages.take(storage.nbytes)

    def give_page_back(self, storage: Storage) -> None:
        if storage.page is not None:
            self._pages.give_back(_slot(storage))
            storage.page = None

    def read_part(
        self, storage: Storage, memory: torch.UntypedStorage, into: torch.Tensor, start: int, nbytes: int
    ) -> Moving:
        return self._pager.read(_slot(storage), _address(into), into, start, nbytes)

    def write_part(
        self, storage: Storage, memory: torch.UntypedStorage, source: torch.Tensor, start: int, nbytes: int
    ) -> Moving:
        return self._pager.write(_slot(storage), _address(source), source, start, nbytes)

    def release(self) -> None:
        return

    def free_bytes(self) -> float:
        return available_bytes()

    def away_bytes(self, table: StorageTable) -> int:
        return sum(s.nbytes for s in table if not s.resident and not s.in_file)

    def discard(self) -> bool:
        return True

    def about_to_fork(self) -> None:
        self._pages.about_to_fork()

    def forked(self) -> None:
        self._pages.forked()

    def become_child(self) -> None:
        self._pages.became_child()
        self._pager = Pager()

    def close(self) -> None:
        self._pager.close()
        self._pages.close()


def _slot(storage: Storage) -> Slot:
    if not isinstance(storage.page, Slot):
        raise RuntimeError(f"storage {storage.number} of {storage.nbytes} bytes has no page")
    return storage.page


@dataclass(slots=True)
class _BlockMove:
    """One transfer of a block, or of a part of one. `keep` holds the memory."""

    move: Callable[[], object]
    nbytes: int
    write: bool
    keep: object
    error: Exception | None = None
    finished: threading.Event = field(default_factory=threading.Event)

    def done(self) -> bool:
        return self.finished.is_set()

    def join(self) -> None:
        self.finished.wait()
        if self.error is not None:
            raise self.error


class GuardedStorages:
    """Evicted storages are blocks without access; guarded memory keeps their pages, and brings them in on access."""

    guarded = True

    def __init__(
        self,
        guard: GuardedMemory,
        directory: Path,
        *,
        read_bytes_per_s: float | None = None,
        write_bytes_per_s: float | None = None,
    ) -> None:
        self._guard, self._worn = guard, worn_by_writing(directory)
        self._speeds = {False: read_bytes_per_s, True: write_bytes_per_s}
        self.stats = PagerStats()
        self._queue: deque[_BlockMove | None] = deque()
        self._start_thread()

    def _start_thread(self) -> None:
        self._queue.clear()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="block-thread", daemon=True)
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)

    def totals(self) -> PagerStats:
        counters, own = self._guard.counters(), self.stats
        return PagerStats(
            read_bytes=counters.read_bytes,
            written_bytes=counters.written_bytes,
            read_seconds=own.read_seconds,
            write_seconds=own.write_seconds,
            stall_seconds=own.stall_seconds + counters.fault_ns / 1e9,
            unworn_bytes=0 if self._worn else counters.written_bytes,
        )

    def peak_bytes(self, table: StorageTable) -> int:
        """All tensors, followed or not, without the mappings of files."""
        return self._guard.counters().peak_resident_bytes

    def stays(self, storage: Storage, memory: torch.UntypedStorage) -> bool:
        return is_shared(memory)

    def read(self, storage: Storage, memory: torch.UntypedStorage) -> Moving:
        return self._submit(partial(self._guard.bring, _block_of(storage, memory)), storage.nbytes, memory, write=False)

    def write(self, storage: Storage, memory: torch.UntypedStorage) -> Moving:
        address = _block_of(storage, memory)
        storage.page = GuardedPage(address)
        return self._submit(partial(self._guard.write_back, address), storage.nbytes, memory, write=True)

    def wait(self, moving: Moving) -> None:
        _wait(moving, self.stats)

    def leave(self, storage: Storage, memory: torch.UntypedStorage) -> None:
        self._guard.evict(_block_of(storage, memory))

    def lose(self, storage: Storage, memory: torch.UntypedStorage) -> None:
        if not storage.mapped:
            self._guard.bring(_block_of(storage, memory))
        ctypes.memset(data_ptr(memory), NAN_BYTE, storage.nbytes)

    def written_past(self, storage: Storage, memory: torch.UntypedStorage) -> bool:
        return False

    def take_from_file(self, storage: Storage, memory: torch.UntypedStorage) -> bool:
        return self._guard.take_from_file(_block_of(storage, memory))

    def seal(self, storage: Storage, memory: torch.UntypedStorage) -> int | None:
        writes = self._guard.seal(_block_of(storage, memory))
        return None if writes is None else writes | _sum_beside_pages(storage, memory) << _WRITES_BITS

    def unwritten(self, storage: Storage, memory: torch.UntypedStorage, writes: int) -> bool:
        beside, writes = divmod(writes, 1 << _WRITES_BITS)
        return self._guard.unwritten(_block_of(storage, memory), writes) and beside == _sum_beside_pages(
            storage, memory
        )

    def drop(self, storage: Storage, memory: torch.UntypedStorage, writes: int) -> bool:
        return self._guard.drop(_block_of(storage, memory), writes)

    def refill(self, storage: Storage, memory: torch.UntypedStorage, made: torch.UntypedStorage) -> None:
        """See `Backing`; raises RuntimeError if it was not dropped, which is a defect of the interceptor."""
        if not self._guard.fill(_block_of(storage, memory), data_ptr(made), storage.nbytes):
            raise RuntimeError(f"storage {storage.number} of {storage.nbytes} bytes was not dropped; report this")

    def bear_away(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self._guard.bearing_away():
            return make()

    def take_page(self, storage: Storage) -> None:
        memory = storage.ref()
        storage.page = None if memory is None else GuardedPage(_block_of(storage, memory))

    def give_page_back(self, storage: Storage) -> None:
        storage.page = None

    def read_part(
        self, storage: Storage, memory: torch.UntypedStorage, into: torch.Tensor, start: int, nbytes: int
    ) -> Moving:
        if storage.block_offset:
            return self._submit(
                partial(ctypes.memmove, _address(into), data_ptr(memory) + start, nbytes),
                nbytes,
                (memory, into),
                write=False,
            )
        move = partial(self._copy, self._guard.read_part, data_ptr(memory), start, _address(into), nbytes)
        return self._submit(move, nbytes, (memory, into), write=False)

    def write_part(
        self, storage: Storage, memory: torch.UntypedStorage, source: torch.Tensor, start: int, nbytes: int
    ) -> Moving:
        if storage.block_offset:
            return self._submit(
                partial(ctypes.memmove, data_ptr(memory) + start, _address(source), nbytes),
                nbytes,
                (memory, source),
                write=True,
            )
        move = partial(self._copy, self._guard.write_part, data_ptr(memory), start, _address(source), nbytes)
        return self._submit(move, nbytes, (memory, source), write=True)

    def _copy(
        self, copy: Callable[[int, int, int, int], bool], block: int, start: int, other: int, nbytes: int
    ) -> None:
        if not copy(block, start, other, nbytes):
            raise PageError(
                f"no block of guarded memory holds {nbytes} bytes from byte {start} at {block:#x}; report this"
            )

    def release(self) -> None:
        self._guard.trim()

    def free_bytes(self) -> float:
        return available_bytes()

    def away_bytes(self, table: StorageTable) -> int:
        """All blocks, followed or not."""
        return self._guard.counters().live_bytes - self._guard.held_bytes()

    def discard(self) -> bool:
        return False

    def about_to_fork(self) -> None:
        return

    def forked(self) -> None:
        return

    def become_child(self) -> None:
        self._start_thread()

    def close(self) -> None:
        with self._wake:
            self._queue.append(None)
            self._wake.notify()
        self._thread.join()

    def _submit(self, move: Callable[[], object], nbytes: int, keep: object, *, write: bool) -> _BlockMove:
        moving = _BlockMove(move, nbytes, write, keep)
        with self._wake:
            self._queue.append(moving)
            self._wake.notify()
        return moving

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue:
                    self._wake.wait()
                moving = self._queue.popleft()
            if moving is None:
                return
            begin = time.perf_counter()
            try:
                moving.move()
            except Exception as error:  # the waiting thread's, which would otherwise wait forever
                moving.error = error
            limit, seconds = self._speeds[moving.write], time.perf_counter() - begin
            if limit and (ahead := moving.nbytes / limit - seconds) > 0:
                time.sleep(ahead)
            self._count(moving, time.perf_counter() - begin)
            moving.keep = None
            moving.finished.set()

    def _count(self, moving: _BlockMove, seconds: float) -> None:
        if moving.write:
            self.stats.written_bytes += moving.nbytes
            self.stats.write_seconds += seconds
        else:
            self.stats.read_bytes += moving.nbytes
            self.stats.read_seconds += seconds
