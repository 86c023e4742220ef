"""Storages of a device that are away: empty there, their pages in the host's memory.

Where the host's memory has no budget a page is pinned memory (`port_agent.intercept.residency.pinned_pages`). Where it
has one, a page is a storage of the host like any other, which that budget bounds and pages to flash; bytes go through a
bounded ring of pinned buffers (`port_agent.backend.transfer_ring`), whose thread alone waits for the device. A device
has no memory protection that shows writes by something other than operators. So before a storage with a valid page is
evicted, a sum of its bytes is computed on the device and compared with the earlier one.
"""

import contextlib
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from port_agent.backend.base import Backend, Event
from port_agent.backend.transfer_ring import RingCopy, TransferRing
from port_agent.intercept.residency.backing import NAN_BYTE
from port_agent.intercept.residency.checksums import Checksums
from port_agent.intercept.residency.pinned_pages import PINNED_CHUNK_BYTES, DirectCopy, PinnedPage, PinnedPages
from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import HostPage, Moving, Storage, StorageTable, resize
from port_agent.paging.pager import PageError, PagerStats
from port_planner.base.units import format_bytes
from port_planner.torch_compat.modes import without_modes

_T = TypeVar("_T")

RING_CHUNK_BYTES = 4 << 20
"""Size of each of the ring's buffers of pinned memory."""

_RESERVE_BYTES, _MIN_RESERVE_BYTES, _RESERVE_SHARE = 512 << 10, 64 << 10, 1 / 16
"""Held of a device's memory, at most a share of its budget, for adding up what has to leave when nothing is free.
CUDA's allocator gives so little from the same memory as single numbers.
"""


@contextlib.contextmanager
def plain_operators() -> Iterator[None]:
    """Run operators in the block without interception, whatever mode the program is in."""
    with without_modes(), torch.inference_mode(mode=False), torch.no_grad():
        yield


class ProgramStreams:
    """The streams of a device that a program computes on; what comes and goes is in order with all of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: list[torch.Stream] = []

    def note(self, stream: torch.Stream | None = None) -> None:
        """Remember the stream that an operator is about to run on, or one that the program has named."""
        noted = torch.accelerator.current_stream(self._device) if stream is None else stream
        if noted not in self._seen:
            self._seen.append(noted)
            self.join()

    def record(self, contents: torch.Tensor) -> None:
        """Make the allocator keep fresh memory, once it is freed, until every other stream has passed that point.

        The memory is the current stream's, and the program may have asked for the tensor on another one, or
        have recorded others on it.
        """
        current = torch.accelerator.current_stream(self._device)
        for other in self._seen:
            if other != current:
                contents.record_stream(other)

    def join(self) -> None:
        """Let all later work of each stream wait for all earlier work of every stream; nothing where there is one."""
        current = torch.accelerator.current_stream(self._device)
        others = [stream for stream in self._seen if stream != current]
        for other in others:
            current.wait_event(other.record_event())
        for other in others:
            other.wait_event(current.record_event())


@dataclass(slots=True)
class DeviceMove:
    """A copy of a storage between the device and its block. `end` makes the block one that may leave again."""

    copy: RingCopy | DirectCopy
    write: bool
    nbytes: int
    wait_on_device: Callable[[Event], None]
    end: Callable[[], None]

    def done(self) -> bool:
        """Return whether it has ended, or is in order on the device."""
        return self.copy.done()

    def join(self) -> None:
        """Return when a write has arrived; of a read, once what the device is given from here on waits for it."""
        try:
            landed = self.copy.landed()
            if not self.write:
                self.wait_on_device(landed)
        finally:
            self.end()


@dataclass(frozen=True, slots=True)
class PartMoved:
    """A part of a page that was copied already."""

    write: bool
    nbytes: int

    def done(self) -> bool:
        """Return True."""
        return True

    def join(self) -> None:
        """Return at once."""


class HostBlocks:
    """Blocks of the host's memory, counted and paged by the host's pool.

    A block whose storage has ended is kept for the next of its size, for newly allocated memory is filled with zeros
    first, at a tenth of the speed. What is kept and what is in use never exceed what was in use at once.
    """

    def __init__(self, host: Residency) -> None:
        self._host = host
        self._kept: OrderedDict[int, list[torch.UntypedStorage]] = OrderedDict()
        self._kept_bytes = self._used_bytes = self._peak_bytes = 0
        self.busy = False
        """Whether the host frees memory for a block, during which the device must not be asked for memory."""

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """Return a block. Raises PageError where the host has none."""
        block = self._take_kept(nbytes)
        self._used_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        if block is not None:
            return block
        while self._kept and self._used_bytes + self._kept_bytes > self._peak_bytes:
            self._take_kept(next(iter(self._kept)))
        try:
            return self._new(nbytes)
        except PageError:
            self._used_bytes -= nbytes
            raise

    def _take_kept(self, nbytes: int) -> torch.UntypedStorage | None:
        blocks = self._kept.get(nbytes)
        if blocks is None:
            return None
        self._kept_bytes -= nbytes
        block = blocks.pop()
        if not blocks:
            del self._kept[nbytes]
        return block

    @contextlib.contextmanager
    def freeing(self) -> Iterator[None]:
        """Set `busy` in the block."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def _new(self, nbytes: int) -> torch.UntypedStorage:
        try:
            with self.freeing():
                self._host.make_free(nbytes)
                return torch.UntypedStorage(nbytes)
        except (RuntimeError, MemoryError) as error:  # torch's allocator says it with either
            raise PageError(
                f"a tensor of {format_bytes(nbytes)} has to leave the device, and the host has no memory for it; "
                "give the program a smaller model or batch, or the device more with --gpu-ram",
                None,
            ) from error

    def give_back(self, block: torch.UntypedStorage, nbytes: int) -> None:
        """Keep a block of that many bytes for the next storage of its size, or free it; under a budget of the
        host's memory none is kept.
        """
        self._used_bytes -= nbytes
        storage = self._host.table.known_storage(block)
        if math.isinf(self._host.limit_bytes) and (storage is None or storage.resident):
            self._kept_bytes += nbytes
            self._kept.setdefault(nbytes, []).append(block)

    def release(self) -> None:
        """Free the blocks that nobody uses."""
        self._kept.clear()
        self._kept_bytes = 0

    def hold(self, block: torch.UntypedStorage, *, write: bool) -> Callable[[], None]:
        """Keep a block resident for a copy, until the returned function is called. Raises PageError."""
        storage = self._host.table.of_storage(block)
        if storage is None:
            return lambda: None
        storage.pins += 1
        try:
            with self.freeing():
                self._host.ensure_resident([storage])
                if write:
                    self._host.change([storage])
        except PageError:
            storage.pins -= 1
            raise

        def let_go() -> None:
            storage.pins -= 1

        return let_go


class DeviceStorages:
    """Keeps the storages of one device that are away; see `port_agent.intercept.residency.backing.Backing`."""

    guarded = False

    def __init__(self, device: torch.device, backend: Backend, host: Residency, limit_bytes: int | None) -> None:
        """`limit_bytes`: most bytes that the device gives this process; None where it is not told."""
        self._device, self._backend = device, backend
        self._reserve_bytes = 0
        self._reserve: torch.Tensor | None = None
        if limit_bytes is not None:
            self._reserve_bytes = max(min(_RESERVE_BYTES, int(limit_bytes * _RESERVE_SHARE)), _MIN_RESERVE_BYTES)
            with plain_operators():
                self._take_reserve()
        self.streams = ProgramStreams(device)
        self.stats = PagerStats()
        self._ring = TransferRing(backend, RING_CHUNK_BYTES, plain_operators)
        self._host, self.blocks = host, HostBlocks(host)
        self._pinned = PinnedPages(backend)
        self._checksums = Checksums(device)
        self._reported: set[str] = set()
        self.before_taking: Callable[[int], None] = lambda nbytes: None
        """Called with the bytes that a storage is about to take of the device's memory."""

    def totals(self) -> PagerStats:
        return self.stats

    def peak_bytes(self, table: StorageTable) -> int:
        return table.peak_bytes

    def stays(self, storage: Storage, memory: torch.UntypedStorage) -> bool:
        return not memory.resizable()

    def read(self, storage: Storage, memory: torch.UntypedStorage) -> Moving:
        page = _page(storage)
        end = self.blocks.hold(page.block, write=False) if isinstance(page, HostPage) else _nothing_held
        try:
            self.before_taking(storage.nbytes)
            with plain_operators():
                self.streams.join()
                resize(memory, storage.nbytes)
                contents = self._bytes(memory)
                self.streams.record(contents)
                copy = self._copied(page, contents, write=False)
        except torch.OutOfMemoryError:
            end()
            raise
        return DeviceMove(copy, False, storage.nbytes, self._wait_on_device, end)

    def write(self, storage: Storage, memory: torch.UntypedStorage) -> Moving:
        if storage.page is None:
            self.take_page(storage)
        page = _page(storage)
        end = self.blocks.hold(page.block, write=True) if isinstance(page, HostPage) else _nothing_held
        try:
            with plain_operators():
                self.streams.join()
                contents = self._bytes(memory)
                page.checksum = self._within_reserve(lambda: self._checksums.of(contents))
                copy = self._copied(page, contents, write=True)
        except torch.OutOfMemoryError:
            end()
            raise
        return DeviceMove(copy, True, storage.nbytes, self._wait_on_device, end)

    def _copied(self, page: HostPage | PinnedPage, contents: torch.Tensor, *, write: bool) -> RingCopy | DirectCopy:
        if isinstance(page, PinnedPage):
            return self._pinned.copy_out(page, contents) if write else self._pinned.copy_in(page, contents)
        block = _host_bytes(page.block)
        return self._ring.out_of_device(block, contents) if write else self._ring.into_device(contents, block)

    def wait(self, moving: Moving) -> None:
        begin = time.perf_counter()
        with plain_operators():
            moving.join()
        self.stats.stall_seconds += time.perf_counter() - begin
        if isinstance(moving, DeviceMove | PartMoved):
            self.stats.read_bytes += 0 if moving.write else moving.nbytes
            self.stats.written_bytes += moving.nbytes if moving.write else 0

    def leave(self, storage: Storage, memory: torch.UntypedStorage) -> None:
        with plain_operators():
            self.streams.join()
            resize(memory, 0)
            if self._reserve is None:
                self._take_reserve()

    def lose(self, storage: Storage, memory: torch.UntypedStorage) -> None:
        with plain_operators():
            resize(memory, storage.nbytes)
            self._bytes(memory).fill_(NAN_BYTE)

    def written_past(self, storage: Storage, memory: torch.UntypedStorage) -> bool:
        before = _page(storage).checksum
        with plain_operators():
            self.streams.join()
            if before is None:  # of a page that was written in parts
                return True
            contents = self._bytes(memory)
            same = self._within_reserve(lambda: bool(self._checksums.of(contents) == before))
        if same is None:  # it is written again
            return True
        if same:
            return False
        self._report_written(storage)
        return True

    def _report_written(self, storage: Storage) -> None:
        place = f"{storage.line}: " if storage.line else ""
        if place not in self._reported:
            self._reported.add(place)
            sys.stderr.write(
                f"port-agent: {place}a tensor of {format_bytes(storage.nbytes)} on {self._device} was written by something other "
                "than an operator; what was written is kept\n"
            )

    def take_from_file(self, storage: Storage, memory: torch.UntypedStorage) -> bool:
        return False

    def seal(self, storage: Storage, memory: torch.UntypedStorage) -> int | None:
        return None

    def unwritten(self, storage: Storage, memory: torch.UntypedStorage, writes: int) -> bool:
        return False

    def drop(self, storage: Storage, memory: torch.UntypedStorage, writes: int) -> bool:
        raise _only_on_the_host(storage)

    def refill(self, storage: Storage, memory: torch.UntypedStorage, made: torch.UntypedStorage) -> None:
        raise _only_on_the_host(storage)

    def bear_away(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    def take_page(self, storage: Storage) -> None:
        with plain_operators():
            storage.page = self._pinned.take(storage.nbytes) if math.isinf(self._host.limit_bytes) else None
        if storage.page is None:
            storage.page = HostPage(self.blocks.take(storage.nbytes), storage.nbytes)

    def give_page_back(self, storage: Storage) -> None:
        if storage.transfer is not None:  # of one that nobody waited for
            with contextlib.suppress(PageError):
                self.wait(storage.transfer)
            storage.transfer = None
        if isinstance(storage.page, HostPage):
            self.blocks.give_back(storage.page.block, storage.page.nbytes)
        elif isinstance(storage.page, PinnedPage):
            self._pinned.give_back(storage.page)
        storage.page = None

    def read_part(
        self, storage: Storage, memory: torch.UntypedStorage, into: torch.Tensor, start: int, nbytes: int
    ) -> Moving:
        return self._part(storage, into, start, nbytes, write=False)

    def write_part(
        self, storage: Storage, memory: torch.UntypedStorage, source: torch.Tensor, start: int, nbytes: int
    ) -> Moving:
        page = _page(storage)
        page.checksum = None
        return self._part(storage, source, start, nbytes, write=True)

    def _part(self, storage: Storage, there: torch.Tensor, start: int, nbytes: int, *, write: bool) -> Moving:
        """Copy part of a page from or to the first bytes of a tensor of the device, and wait for it."""
        page = _page(storage)
        end = self.blocks.hold(page.block, write=write) if isinstance(page, HostPage) else _nothing_held
        try:
            with plain_operators():
                self.streams.join()
                contents, place = there.view(-1).view(torch.uint8), 0
                for host in _host_parts(page, start, nbytes):
                    part = contents[place : place + len(host)]
                    if write:
                        host.copy_(part)
                    else:
                        part.copy_(host)
                    place += len(host)
        finally:
            end()
        return PartMoved(write, nbytes)

    def release(self) -> None:
        self.blocks.release()
        empty_cache = getattr(torch.get_device_module(self._device), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()

    def free_bytes(self) -> float:
        return math.inf  # the device says so itself

    def away_bytes(self, table: StorageTable) -> int:
        return sum(s.nbytes for s in table if not s.resident)

    def discard(self) -> bool:
        return False

    def about_to_fork(self) -> None:
        return

    def forked(self) -> None:
        return

    def become_child(self) -> None:
        return

    def close(self) -> None:
        self._reserve_bytes, self._reserve = 0, None
        self._checksums.release()
        self._ring.close()
        self.blocks.release()
        self._pinned.release()

    def _within_reserve(self, compute: Callable[[], _T]) -> _T | None:
        """Return what sums over bytes give, within what is held for them: nothing else of the device may be free.

        None if the device has no memory even so, because its free memory is fragmented.
        """
        self._reserve = None
        try:
            return compute()
        except torch.OutOfMemoryError:
            return None
        finally:
            self._take_reserve()

    def _take_reserve(self) -> None:
        with contextlib.suppress(torch.OutOfMemoryError):  # taken once there is room again
            self._reserve = torch.empty(self._reserve_bytes, dtype=torch.uint8, device=self._device)

    def _wait_on_device(self, landed: Event) -> None:
        self._backend.wait(landed)
        self.streams.join()

    def _bytes(self, memory: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return empty.set_(memory, 0, (memory.nbytes(),), (1,))


def _host_bytes(block: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(block, 0, (block.nbytes(),), (1,))


def _host_parts(page: HostPage | PinnedPage, start: int, nbytes: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of a page from `start` on, as they lie in the host's memory."""
    if isinstance(page, HostPage):
        yield _host_bytes(page.block)[start : start + nbytes]
        return
    for number, chunk in enumerate(page.chunks):
        begin = number * PINNED_CHUNK_BYTES
        first, last = max(start, begin), min(start + nbytes, begin + PINNED_CHUNK_BYTES)
        if first < last:
            yield chunk[first - begin : last - begin]


def _nothing_held() -> None:
    return


def _page(storage: Storage) -> HostPage | PinnedPage:
    if not isinstance(storage.page, HostPage | PinnedPage):
        raise RuntimeError(f"storage {storage.number} of {storage.nbytes} bytes has no page")
    return storage.page


def _only_on_the_host(storage: Storage) -> RuntimeError:
    return RuntimeError(
        f"storage {storage.number} of {storage.nbytes} bytes is a device's, which is moved whole; report this"
    )
