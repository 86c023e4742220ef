"""Move storages in and out of RAM so that resident storages stay within the limit.

This is correct whatever the advice: an operator's storages are made resident before it runs, and nothing is dropped
that could not come back with the same bytes. The page thread moves storages; this side waits only for what is needed
now.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from port_agent.intercept.residency.backing import Backing
from port_agent.intercept.residency.eviction import EvictionPolicy
from port_agent.intercept.residency.refusals import UnsupportedError, unsupported
from port_agent.intercept.residency.storages import (
    NEVER,
    Storage,
    StorageTable,
    drop_mapping,
    mapping_written,
    populate_mapping,
)
from port_agent.intercept.residency.trace import AHEAD
from port_agent.paging.pager import PageError
from port_planner.base.errors import ExitCode, PortError
from port_planner.base.units import format_bytes

_MEASURED_FROM_BYTES = 32 << 20
_UNMEASURED_BYTES_PER_S = 1e9
"""The medium is assumed to be fast until this much was moved."""


class NotRestorableError(PortError):
    """Evicted tensors do not fit into memory: they stay paged out, and the budget stays in force."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(slots=True)
class Counters:
    """What was moved and recomputed since the start, in bytes of storages; `over_bytes` is
    the most that did not fit.
    """

    recomputed_bytes: int = 0
    recomputing_seconds: float = 0.0
    mapped_bytes: int = 0
    over_bytes: int = 0


class Residency:
    """Makes storages resident and evicts them; `limit_bytes` limits what is resident."""

    def __init__(self, table: StorageTable, backing: Backing, limit_bytes: float) -> None:
        self.table, self.backing = table, backing
        self.limit_bytes = limit_bytes
        self.eviction = EvictionPolicy()
        self.counters = Counters()
        self.clock = 0
        self.trust_trace = False
        """Whether recomputation is trusted now, because the program follows its trace."""
        self.read_only = False
        """Whether pages are only read, as in a child process."""
        self.pressed = False
        """Whether anything ever had to be evicted."""
        self.kept: set[Storage] = set()
        """Storages that are evicted only if no other can be, because the program announced that it needs them again
        soon.
        """
        self.released: deque[Storage] = deque()
        """Storages that nothing borrows any more, once for each loan; Python may append to it between any two lines."""
        self.before_mapping: Callable[[int], None] = lambda nbytes: None
        """Called with the bytes of a file's pages that are about to come in."""
        self.others_leave: Callable[[int], bool] = lambda nbytes: False
        """Called with the bytes that are lacking once nothing else can leave; returns whether `limit_bytes` has grown."""

    # -- making resident

    def ensure_resident(self, storages: Iterable[Storage]) -> None:
        """Return when all of `storages` are resident and filled. Pin them first. Raises PageError."""
        away = []
        for storage in storages:
            if not storage.resident or storage.reading:
                away.append(storage)
            elif not storage.order:  # no operator has used it yet: from now on it can be evicted
                self.eviction.touch(storage, self.clock, None)
        for storage in away:
            if not storage.resident:
                self._start(storage)
        for storage in away:
            self.wait_read(storage)

    def prefetch(self, storage: Storage, reserve_bytes: int, needed_at: int) -> bool:
        """Start reading an evicted storage, leaving `reserve_bytes` free; return False if there is no memory for it
        yet.

        Only storages that are evicted at no cost and are needed after clock `needed_at` make space: nothing waits here.
        """
        if not storage.clean or storage.page is None or storage.ref() is None:
            return True
        target = self.limit_bytes - storage.nbytes - reserve_bytes
        while self.table.resident_bytes > target:
            evicted = self.eviction.choose(self.clock, self._stays, self.leaves_free)
            if evicted is not None and evicted.writing and self.leaves_free(evicted):
                self.wait_transfer(evicted)
            if evicted is not None:
                self.notice_writes(evicted)
            if evicted is None or not evicted.clean:
                return False
            if evicted.next_use is not None and evicted.next_use <= needed_at:
                return False
            self._free(evicted)
        try:
            self._start_read(storage)
        except torch.OutOfMemoryError:  # of a device, whose free memory is fragmented
            return False
        storage.next_use = needed_at
        self.eviction.touch(storage, storage.last_use, needed_at)
        return True

    def wait_read(self, storage: Storage) -> None:
        """Wait for a read in progress. Raises PageError, after which the storage is still paged out."""
        transfer = storage.transfer
        if transfer is None or transfer.write:
            return
        storage.transfer = None
        try:
            self.backing.wait(transfer)
        except PageError:
            self._free(storage)
            raise

    def _start(self, storage: Storage) -> None:
        if storage.in_file:
            self.try_make_free(storage.nbytes)
            self.before_mapping(storage.nbytes)
            populate_mapping(_alive(storage))
            self._count_in(storage)
            self.counters.mapped_bytes += storage.nbytes
        elif storage.clean:
            self.try_make_free(storage.nbytes)
            try:
                self._start_read(storage)
            except torch.OutOfMemoryError:  # of a device, whose free memory is fragmented
                if math.isinf(self.limit_bytes):  # all is brought back
                    raise
                self.empty()
                self.backing.release()
                self._start_read(storage)
        else:
            self._recompute(storage)

    def _start_read(self, storage: Storage) -> None:
        storage.transfer = self.backing.read(storage, _alive(storage))
        self._count_in(storage)

    def _recompute(self, storage: Storage) -> None:
        remat = storage.remat
        if remat is None:
            raise RuntimeError(
                f"storage {storage.number} of {storage.nbytes} bytes has neither a page nor a rematerialization; report this"
            )
        for source in remat.sources:
            source.pins += 1
            if source.left_at is not None and source.resident:
                source.left_at.stayed()
        try:
            self.ensure_resident(remat.sources)
            self.make_free(2 * storage.nbytes + remat.workspace_bytes)
            began = time.perf_counter()
            if not remat.unwritten():
                raise _written_meanwhile(storage)
            self.backing.refill(storage, _alive(storage), remat.run())
            self.counters.recomputing_seconds += time.perf_counter() - began
        finally:
            for source in remat.sources:
                source.pins -= 1
        self._count_in(storage)
        storage.hold = ()
        self.counters.recomputed_bytes += storage.nbytes

    def _count_in(self, storage: Storage) -> None:
        storage.resident = True
        self.table.came(storage)
        self.eviction.touch(storage, self.clock, storage.next_use)

    # -- evicting

    def make_free(self, nbytes: int) -> bool:
        """Evict storages until `nbytes` more fit, and return whether they do; the shortage
        is counted as `over_bytes`.
        """
        target = self.limit_bytes - nbytes
        if self.table.resident_bytes <= target or self.read_only:
            return True
        self._take_back()
        if not self.pressed:
            self.pressed = True
            self.eviction.put_in_order(self.table)
        while self.table.resident_bytes > target:
            if self._let_go(self.table.resident_bytes - target):
                continue
            if self.kept:
                self.kept.clear()
            elif self.others_leave(int(self.table.resident_bytes - target)):
                target = self.limit_bytes - nbytes
            else:
                self._count_over(nbytes)
                return False
        return True

    def could_fit(self, nbytes: int) -> bool:
        """Return whether `nbytes` more would fit if everything possible were evicted."""
        return nbytes + sum(s.nbytes for s in self.table if s.resident and self._stays(s)) <= self.limit_bytes

    def leave_to_files(self, storages: Iterable[Storage]) -> None:
        """Evict those storages whose files hold their contents."""
        for storage in storages:
            if storage.resident and storage.in_file and not self._stays(storage):
                self.notice_writes(storage)
                if storage.in_file:
                    self._free(storage)

    def empty(self) -> None:
        """Evict everything possible, without relying on recomputation. Raises PageError."""
        limit_bytes, over_bytes, trust_trace = self.limit_bytes, self.counters.over_bytes, self.trust_trace
        self.limit_bytes, self.trust_trace = 0, False
        try:
            self.make_free(0)
        finally:
            self.limit_bytes, self.counters.over_bytes, self.trust_trace = limit_bytes, over_bytes, trust_trace

    def _count_over(self, nbytes: int) -> None:
        over_bytes = int(self.table.resident_bytes + nbytes - self.limit_bytes)
        self.counters.over_bytes = max(self.counters.over_bytes, over_bytes)

    def leaves_free(self, storage: Storage) -> bool:
        """Return whether a storage can be evicted without waiting for a write."""
        if storage.writing and storage.transfer is not None:
            return storage.transfer.done()
        return storage.clean or (self.trust_trace and storage.remat is not None and storage.remat.possible(storage))

    def try_make_free(self, nbytes: int = 0) -> None:
        """Free `nbytes` as `make_free` does, after an operator or for what is read back; nothing new is made.

        If a full or broken medium rejects writes, the next operator raises the error before it runs.
        """
        try:
            self.make_free(nbytes)
        except PageError:
            self._count_over(nbytes)

    def write_early(self, storage: Storage) -> None:
        """Start writing a storage that was evicted before its next use the last time, so that nothing waits when it is
        evicted.
        """
        if not storage.resident or storage.transfer is not None or self.read_only:
            return
        if not self._stays(storage) and not self.leaves_free(storage):
            with contextlib.suppress(PageError):  # no disk space: raised when the storage has to be evicted
                self._start_write(storage)

    def keep_smaller(self, storage: Storage) -> None:
        """Drop a storage that is not needed soon and can be recomputed from something much smaller.

        This must happen at once, because that source is about to be freed and could not be kept later.
        """
        if storage.remat is None or storage.clean or not storage.resident or storage.transfer is not None:
            return
        if storage.next_use is None or storage.next_use - self.clock <= AHEAD or self.read_only or self._stays(storage):
            return
        if self.leaves_free(storage) and storage.remat.kept_for(storage):
            self._leave(storage)

    def paging_seconds(self, nbytes: int) -> float:
        """Return the seconds of writing and reading `nbytes` on this medium, as measured so far."""
        stats = self.backing.stats
        total = stats.read_bytes + stats.written_bytes
        if total < _MEASURED_FROM_BYTES:
            return 2 * nbytes / _UNMEASURED_BYTES_PER_S
        return 2 * nbytes * stats.busy_seconds / total

    def bytes_per_s(self, *, write: bool) -> float:
        """Return the write or read speed of the medium, as measured so far."""
        stats = self.backing.stats
        moved, seconds = (stats.written_bytes, stats.write_seconds) if write else (stats.read_bytes, stats.read_seconds)
        return moved / seconds if moved >= _MEASURED_FROM_BYTES else _UNMEASURED_BYTES_PER_S

    def _let_go(self, wanted: float) -> bool:
        """Evict at least one storage; several writes are started at once if more than one is `wanted`.

        Raises PageError if one cannot be written and nothing else can be evicted; it then stays resident and valid.
        """
        writing: list[Storage] = []
        freed = 0.0
        failed: PageError | None = None
        while freed < wanted:
            keep = self._stays if failed is None else self._must_be_written
            storage = self.eviction.choose(self.clock, keep, self.leaves_free)
            if storage is None and self._wait_reads():
                continue
            if storage is None:
                break
            self.notice_writes(storage)
            if self._stays(storage):
                continue
            if storage.transfer is None and self.leaves_free(storage):
                freed += storage.nbytes
                self._leave(storage)
                continue
            if storage.transfer is None:
                try:
                    self._start_write(storage)
                except PageError as error:
                    failed = error
                    continue
            self.eviction.forget(storage)
            freed += storage.nbytes
            if storage.left_at is not None:
                storage.left_at.left()
            writing.append(storage)
        for storage in writing:
            try:
                self._wait_write(storage)
            except PageError as error:
                failed = error
                freed -= storage.nbytes
                continue
            self.notice_writes(storage)  # which may have been meanwhile
            if storage.clean:
                self._leave(storage)
            else:
                self.eviction.touch(storage, storage.last_use, storage.next_use)
                freed -= storage.nbytes
        if failed is not None and freed < wanted:
            raise failed
        return freed > 0

    def _wait_reads(self) -> bool:
        """Wait for prefetched pages, so that they can be evicted again; return whether there were any."""
        fetched = [s for s in self.table if s.reading and s.pins == 0]
        for storage in fetched:
            with contextlib.suppress(PageError):  # paged out again: the operator that needs it reads it, and raises
                self.wait_read(storage)
        return bool(fetched)

    def _must_be_written(self, storage: Storage) -> bool:
        return self._stays(storage) or storage.writing or not self.leaves_free(storage)

    def _stays(self, storage: Storage) -> bool:
        memory = storage.ref()
        if memory is None or storage.pins > 0 or storage.reading or storage in self.kept:
            return True
        return self.backing.stays(storage, memory)

    def _start_write(self, storage: Storage) -> None:
        storage.transfer = self.backing.write(storage, _alive(storage))

    def _wait_write(self, storage: Storage) -> None:
        """Wait for a write in progress. Raises PageError; the storage then stays resident and valid."""
        transfer = storage.transfer
        if transfer is None or not transfer.write:
            return
        storage.transfer = None
        try:
            self.backing.wait(transfer)
        except PageError:
            storage.page = None
            self.eviction.touch(storage, storage.last_use, storage.next_use)
            raise
        storage.clean = True

    def wait_transfer(self, storage: Storage) -> None:
        """Wait for a write that nothing depends on: if it fails the storage stays, and no page holds it."""
        with contextlib.suppress(PageError):
            self._wait_write(storage)

    def change(self, storages: Sequence[Storage]) -> None:
        """Record that storages are about to be written: dropped storages that depend on them are recomputed now.

        Their pages and rematerializations become void. Raises PageError, after which nothing is changed.
        """
        trust_trace, self.trust_trace = self.trust_trace, False  # otherwise freeing memory would drop it again
        try:
            for storage in storages:
                if storage.dependents:
                    self.ensure_resident(
                        [d for d in storage.dependents if not d.resident and not d.clean and d.ref() is not None]
                    )
        finally:
            self.trust_trace = trust_trace
        for storage in storages:
            if storage.writing:
                self.wait_transfer(storage)
            if storage.in_file and self.backing.take_from_file(storage, _alive(storage)):
                self.table.left_file(storage)
            storage.dependents = None
            storage.version += 1
            storage.remat = None
            storage.clean = False

    def watch(self, storage: Storage) -> None:
        """Record that a pointer to a mapped storage was handed out, and may be written through."""
        self.change([storage])
        storage.clean = storage.watched = True

    def notice_writes(self, storage: Storage) -> None:
        """Check whether a storage that is about to leave was written past the operators: its page is void then.

        The pages of a mapped storage whose pointer was handed out are checked; one that was written stays resident for
        good.
        """
        memory = storage.ref()  # None if it died while it was written
        if memory is not None and storage.clean and storage.resident and self.backing.written_past(storage, memory):
            self.change([storage])
        guarded = self.backing.guarded
        if not (storage.watched or guarded) or not storage.in_file or not mapping_written(_alive(storage)):
            return
        if guarded:
            self._leave_file(storage)
            return
        if not storage.resident:
            self._count_in(storage)
        self.change([storage])
        storage.pins += 1

    def _leave_file(self, storage: Storage) -> None:
        """Record that a mapped storage is a block like any other from now on."""
        self.table.left_file(storage)
        self.eviction.touch(storage, self.clock, storage.next_use)
        self.change([storage])

    def page_from_here(self, storages: Iterable[Storage]) -> None:
        """Recompute what of `storages` was dropped, and page it from now on. Raises PageError."""
        for storage in storages:
            if storage.remat is None or storage.ref() is None:
                continue
            storage.pins += 1
            try:
                self.ensure_resident([storage])
            finally:
                storage.pins -= 1
            storage.remat = None

    def drop_touched(self, storages: Iterable[Storage]) -> None:
        """Release pages of mapped storages that an operator touched without having been brought in for it."""
        for storage in storages:
            if storage.resident:
                continue
            self.notice_writes(storage)
            if storage.in_file:
                drop_mapping(_alive(storage))

    def bear_away(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a new tensor that starts in the page file: its contents are written there. Raises PageError."""
        made = self.backing.bear_away(make)
        storage = self.table.host.of(made)
        if storage is not None:
            self.backing.take_page(storage)
            self._free(storage)
        return made

    def resized(self, storage: Storage) -> bool:
        """Record that an operator may have resized a storage that it wrote; return whether it did.

        Its page does not fit then.
        """
        changed = self.table.resized(storage)
        if changed:
            self.backing.give_page_back(storage)
        return changed

    def borrow(self, storage: Storage) -> None:
        """Keep a storage resident and writable until it is in `released`. Raises PageError.

        As much memory again is kept free, because what is borrowed is usually copied.
        """
        storage.pins += 1
        storage.borrowed += 1
        self.ensure_resident([storage])
        self.change([storage])
        self.try_make_free(storage.nbytes)

    def _take_back(self) -> None:
        while self.released:
            storage = self.released.popleft()
            storage.pins -= 1
            storage.borrowed -= 1

    def _leave(self, storage: Storage) -> None:
        remat = storage.remat
        if not storage.clean and remat is not None:
            kept = remat.kept_for(storage)
            if self.backing.drop(storage, _alive(storage), remat.writes):
                storage.hold = remat.take_hold(storage)
                self._went(storage)
                for source in kept:
                    if source.next_use == NEVER:
                        self.eviction.touch(source, source.last_use, storage.next_use)
                return
            self.backing.take_page(storage)  # it was written, or is already evicted: treat it as paged
            storage.clean, storage.remat = True, None
        self._free(storage)

    def _free(self, storage: Storage) -> None:
        memory = storage.ref()
        self._went(storage)
        if memory is None:
            return
        if storage.mapped:
            drop_mapping(memory)
        else:
            self.backing.leave(storage, memory)

    def _went(self, storage: Storage) -> None:
        storage.resident = False
        storage.left_at = None
        self.eviction.forget(storage)
        self.table.went(storage)

    # -- the end of storages

    def reclaim_dead(self) -> list[Storage]:
        """Reclaim what dead storages held, and return those that died since the last call."""
        if not self.table.dead:
            return []
        dead = list(self.table.reclaim_dead())
        for gone in dead:
            gone.resident = False
            self.eviction.forget(gone)
            self.backing.give_page_back(gone)
            gone.remat = None
            gone.hold = ()
        return dead

    def become_child(self) -> None:
        """Continue in a forked child without a limit, which reads pages by a page thread of its own and writes none."""
        self.read_only = True
        self.limit_bytes = math.inf
        self.backing.become_child()

    def drain(self) -> None:
        """Wait for every transfer in progress; if one fails, the storage is where it was before."""
        for storage in self.table:
            if storage.reading:
                with contextlib.suppress(PageError):
                    self.wait_read(storage)
            elif storage.writing:
                self.wait_transfer(storage)

    def discard(self) -> None:
        """Free every evictable storage, unwritten, for a process that ends; or make resident what only an operator
        could recompute.
        """
        if not self.backing.discard():
            self.ensure_resident([s for s in self.table if not s.resident and not s.clean and s.ref() is not None])
            return
        for storage in list(self.table):
            if storage.resident and not self._stays(storage):
                self._free(storage)

    def restore(self) -> None:
        """Bring everything back.

        Raises NotRestorableError if it does not fit into memory; nothing is lost then, and evicted tensors can be used
        and brought back later. Raises PageError for the first page that cannot be read; all that is lost then holds
        NaN.
        """
        away_bytes = self.backing.away_bytes(self.table)
        if away_bytes > (free_bytes := self.backing.free_bytes()):
            raise NotRestorableError(_does_not_fit(away_bytes, f"in {format_bytes(free_bytes)} of memory"))
        lost: list[Storage] = []
        first: PageError | None = None
        for step in (self._start, self.wait_read):
            for storage in self.table:
                memory = storage.ref()  # held, because the garbage collector may run meanwhile
                if memory is None or storage.in_file or (storage.resident and not storage.reading):
                    continue
                try:
                    step(storage)
                except PageError as error:
                    first = first or error
                    lost.append(storage)
                except (RuntimeError, MemoryError) as error:  # torch's allocator raises either
                    raise NotRestorableError(_does_not_fit(away_bytes, f"({error})")) from error
        for storage in lost:
            self._fill_with_nan(storage)
        if first is not None:
            raise PageError(
                f"{len(lost)} tensors of {format_bytes(sum(s.nbytes for s in lost))} are lost and hold NaN now; the others "
                f"are intact; continue from a checkpoint. {first}",
                first.errno,
            ) from first

    def _fill_with_nan(self, storage: Storage) -> None:
        self.backing.lose(storage, _alive(storage))
        self._count_in(storage)


def _written_meanwhile(storage: Storage) -> UnsupportedError:
    return unsupported(
        f"a tensor of {format_bytes(storage.nbytes)} was dropped to be recomputed, but something other than an operator has "
        "written its operands since",
        "run with --no-recompute",
    )


def _does_not_fit(away_bytes: int, where: str) -> str:
    return (
        f"{format_bytes(away_bytes)} of tensors in the page file do not fit {where}; the budget stays in force and "
        "nothing is lost: save or delete tensors and stop() again, or end with stop(restore=False)"
    )


def _alive(storage: Storage) -> torch.UntypedStorage:
    memory = storage.ref()
    if memory is None:
        raise RuntimeError(f"storage {storage.number} of {storage.nbytes} bytes is used after its end")
    return memory
