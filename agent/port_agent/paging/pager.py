"""The page thread: moves storages between RAM and flash while torch computes.

Files are opened with O_DIRECT if the file system supports it (F_NOCACHE on macOS). Then there is no copy in the page
cache, the controller's DMA moves the data, and neither the GIL nor a core is occupied. Otherwise (tmpfs, some network
file systems) transfers are buffered, and dropped from the page cache afterwards. Every block is checksummed on its way.
"""

import collections
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from port_agent.packing.pages import DamagedPageError, pack_page, unpack_page
from port_agent.system.mounts import worn_by_writing
from port_planner.base.direct_io import BLOCK, padded
from port_planner.base.errors import PortError

if TYPE_CHECKING:
    import torch

    from port_agent.backend.base import Event
    from port_agent.backend.staging import DeviceSide, Staging

CHUNK = 1 << 20
"""Bytes per checksum."""

BURST = 4 * CHUNK
"""Bytes per system call.

A gigabyte costs 0.09 s of kernel time at 1 MiB and 0.05 s at 4 MiB; smaller bursts also lose bandwidth.
"""


ZEROS = -1
"""Mark in `Slot.packed_bytes`: the chunk is all zeros, as in a new optimizer's state, and is
not stored on the medium.
"""

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_STACK_BYTES = 1 << 20
"""Stack in bytes of the page thread; the system's 8 MiB would count against RLIMIT_DATA."""


class PageError(PortError):
    """A transfer to or from flash failed.

    `errno` is the system's, None for a checksum that does not match.
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number


class CorruptPageError(PageError):
    """Data read from flash differs from what was written, or could not be read.

    `path`: the file. `offset`: the byte.
    """

    def __init__(self, path: Path, offset: int, message: str, number: int | None = None) -> None:
        super().__init__(message, number)
        self.path, self.offset = path, offset


class PageFile:
    """A file of blocks.

    `direct`: whether it bypasses the page cache. `worn`: whether writing to it wears out a medium.
    """

    def __init__(self, path: Path, *, direct: bool = True, read_only: bool = False) -> None:
        """`read_only`: an existing file of the user that is never changed.

        Its blocks do not align with tensors, so it is not `direct`.
        """
        self.path = path
        own = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        flags = os.O_CLOEXEC | (os.O_RDONLY | os.O_NONBLOCK if read_only else own)
        direct = direct and not read_only
        self.direct = direct and hasattr(os, "O_DIRECT")
        try:
            self.fd = os.open(path, flags | (os.O_DIRECT if self.direct else 0), 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise page_error(error, path, "opened", 0) from error
            self.direct = False
            self.fd = os.open(path, flags, 0o600)
        if sys.platform == "darwin" and direct:
            fcntl.fcntl(self.fd, fcntl.F_NOCACHE, 1)
            self.direct = True
        self.worn = worn_by_writing(path)

    def reserve(self, nbytes: int) -> None:
        """Make the file at least `nbytes` long and allocate its space, so that a full disk is reported now.

        Raises PageError with the remedy if there is no space.
        """
        if os.fstat(self.fd).st_size >= nbytes:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, 0, nbytes)
            else:
                os.ftruncate(self.fd, nbytes)
        except OSError as error:
            raise page_error(error, self.path, "extended", nbytes) from error

    def sync(self) -> None:
        """Return once everything written so far is on the medium.

        Raises PageError if the medium fails.
        """
        try:
            if sys.platform == "darwin":
                fcntl.fcntl(self.fd, fcntl.F_FULLFSYNC)
            else:
                os.fdatasync(self.fd)
        except OSError as error:
            raise page_error(error, self.path, "synchronised", 0) from error

    def close(self) -> None:
        os.close(self.fd)


def make_directory(path: Path) -> None:
    """Create a directory for page files if there is none; raises PageError with the remedy."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise page_error(error, path, "made", 0) from error


def unnamed_page_file(directory: Path) -> PageFile:
    """Return a new unnamed page file in `directory`, which disappears however the process ends.

    Raises PageError if it cannot be created.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=".port-agent-pages-", dir=directory)
        os.close(handle)
        with contextlib.ExitStack() as opened:
            try:
                file = PageFile(Path(name))
                opened.callback(file.close)
            finally:
                Path(name).unlink()
            opened.pop_all()
            return file
    except OSError as error:
        raise PageError(
            f"no page file can be created in {directory}: {os.strerror(error.errno or 0)}; choose another --page-dir "
            "(page_dir=)",
            error.errno,
        ) from error


def page_error(error: OSError, path: Path, verb: str, nbytes: int) -> PageError:
    """Return the error for a file that could not be `verb`, with the system's reason and the remedy.

    An `nbytes` of 0 is omitted.
    """
    remedy = {
        errno.ENOSPC: "free space there or choose another --page-dir",
        errno.EFBIG: "raise the limit of file sizes (ulimit -f) or choose another --page-dir",
        errno.EDQUOT: "raise the quota or choose another --page-dir",
        errno.EROFS: "the file system is read-only; remount it or choose another --page-dir",
        errno.EACCES: "give this user write access or choose another --page-dir",
        errno.EIO: "the medium reports an error; copy your data off it and replace it",
    }.get(error.errno or 0, "check the medium and the directory")
    size = f" ({nbytes / 2**20:.1f} MiB)" if nbytes else ""
    return PageError(f"{path} could not be {verb}{size}: {os.strerror(error.errno or 0)}; {remedy}", error.errno)


class Slot:
    """A place in a page file for one storage, with a checksum of each chunk that was written to it, or
    that a user's file has there.

    Only the page thread accesses the checksums, in the order of the queue, so a read always knows the previous write.
    """

    __slots__ = ("file", "item_bytes", "nbytes", "offset", "packed_bytes", "sums")

    def __init__(
        self, file: PageFile, offset: int, nbytes: int, sums: list[int | None] | None = None, *, item_bytes: int = 0
    ) -> None:
        """`item_bytes`: size of the floating-point numbers in it if its chunks are packed; 0 if they are not."""
        self.file, self.offset, self.nbytes, self.item_bytes = file, offset, nbytes, item_bytes
        self.sums: list[int | None] = sums or [None] * -(-nbytes // CHUNK)
        """Checksums of the bytes on the medium."""
        self.packed_bytes: list[int] = [0] * len(self.sums)
        """For each chunk, its packed bytes on the medium; 0: it is not packed; `ZEROS`: nothing is stored."""


@dataclass(slots=True)
class Transfer:
    """One transfer in progress: `nbytes` from byte `start` of a slot. `keep`: the owner of the
    memory, which must live on.

    `device`: the other end, if it is not host memory; `address` is then unused.
    """

    slot: Slot
    address: int
    start: int
    nbytes: int
    write: bool
    keep: Any
    device: "DeviceSide | None" = None
    landed: "Event | None" = None
    """Event that occurs when the read bytes are on the device."""
    error: Exception | None = None
    finished: threading.Event = field(default_factory=threading.Event)

    def done(self) -> bool:
        return self.finished.is_set()

    def join(self) -> None:
        """Return once the transfer is done; raise its failure, a PageError for everything that flash can cause."""
        self.finished.wait()
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class PagerStats:
    """Totals since the pager started.

    They include the seconds in which the page thread read and wrote, and in which compute waited for it.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    stall_seconds: float = 0.0
    unworn_bytes: int = 0
    """The part of `written_bytes` that went to compressed RAM, which writing does not wear out."""

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the page thread moved data, checksums included."""
        return self.read_seconds + self.write_seconds

    def shares(self, count: int) -> "list[PagerStats]":
        """Return `count` approximately equal parts that add up to these totals."""
        totals = [getattr(self, f.name) for f in fields(self)]
        parts = [
            [n * (k + 1) // count - n * k // count if isinstance(n, int) else n / count for n in totals]
            for k in range(count)
        ]
        return [PagerStats(*part) for part in parts]

    def since(self, earlier: "PagerStats") -> "PagerStats":
        """Return the difference to `earlier`, a copy of these totals."""
        return PagerStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


class Pager:
    """One page thread with a FIFO queue.

    `read_bytes_per_s` and `write_bytes_per_s` throttle it to the speed of a slower medium, to test a plan for a Pi's SD
    card. `staging`: buffers for data on a device.
    """

    def __init__(
        self,
        *,
        read_bytes_per_s: float | None = None,
        write_bytes_per_s: float | None = None,
        staging: "Staging | None" = None,
    ) -> None:
        self.stats = PagerStats()
        self.staging = staging
        self._limits = {False: read_bytes_per_s, True: write_bytes_per_s}
        self._queue: collections.deque[Transfer | None] = collections.deque()
        self._wake = threading.Condition()
        self._packed = bytearray()
        """Buffer for a chunk's packed form, once there is one."""
        self._bounce = mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._thread = threading.Thread(target=self._run, name="page-thread", daemon=True)
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)

    def write(self, slot: Slot, address: int, keep: Any, start: int = 0, nbytes: int | None = None) -> Transfer:
        """Queue a write of the memory at `address` to `slot` (from byte `start`, a multiple of CHUNK)."""
        return self._submit(Transfer(slot, address, start, slot.nbytes if nbytes is None else nbytes, True, keep))

    def read(self, slot: Slot, address: int, keep: Any, start: int = 0, nbytes: int | None = None) -> Transfer:
        """Queue a read into `address`; no byte beyond `nbytes` is touched there."""
        return self._submit(Transfer(slot, address, start, slot.nbytes if nbytes is None else nbytes, False, keep))

    def send(self, slot: Slot, contents: "torch.Tensor", start: int = 0) -> Transfer:
        """Queue a write of these bytes, on any device, to byte `start` of a slot; the transfer
        holds them until it is done.
        """
        return self._submit(self._transfer(slot, contents, start, contents.numel(), write=True))

    def receive(self, slot: Slot, into: "torch.Tensor", start: int = 0, nbytes: int | None = None) -> Transfer:
        """Queue a read from byte `start` of a slot into these bytes, on any device; `arrived` makes them usable."""
        return self._submit(self._transfer(slot, into, start, slot.nbytes if nbytes is None else nbytes, write=False))

    def _transfer(self, slot: Slot, memory: "torch.Tensor", start: int, nbytes: int, *, write: bool) -> Transfer:
        if memory.is_cpu:
            return Transfer(slot, memory.data_ptr(), start, nbytes, write, memory)
        if self.staging is None:
            raise PageError("a storage on a device cannot be paged without staging buffers; report this")
        return Transfer(slot, 0, start, nbytes, write, memory, self.staging.side(memory))

    def arrived(self, transfer: Transfer) -> None:
        """Make the data of a finished transfer visible to the device's later computations."""
        if transfer.landed is not None and self.staging is not None:
            self.staging.backend.wait(transfer.landed)

    def _submit(self, transfer: Transfer) -> Transfer:
        with self._wake:
            self._queue.append(transfer)
            self._wake.notify()
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Wait as `Transfer.join` does, for the compute thread: the wait counts as a stall."""
        begin = time.perf_counter()
        try:
            transfer.join()
        finally:
            self.stats.stall_seconds += time.perf_counter() - begin

    def close(self) -> None:
        """Finish queued transfers and stop the thread."""
        with self._wake:
            self._queue.append(None)
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue:
                    self._wake.wait()
                transfer = self._queue.popleft()
            if transfer is None:
                return
            begin = time.perf_counter()
            try:
                self._move(transfer, begin)
            except OSError as error:
                transfer.error = _transfer_error(error, transfer)
            except Exception as error:  # the waiting thread's, which would otherwise wait forever
                transfer.error = error
            if transfer.write:
                self.stats.write_seconds += time.perf_counter() - begin
            else:
                self.stats.read_seconds += time.perf_counter() - begin
            if transfer.device is not None:
                transfer.landed = transfer.device.landed
            transfer.keep = transfer.device = (
                None  # release before signalling: a waiter may need this memory immediately
            )
            transfer.finished.set()

    def _move(self, transfer: Transfer, begin: float) -> None:
        limit = self._limits[transfer.write]
        slot, file, device, moved, stored = transfer.slot, transfer.slot.file, transfer.device, 0, 0
        bounced = device is not None and not device.reach()
        while moved < transfer.nbytes:
            place, address = transfer.start + moved, transfer.address + moved
            size = min(CHUNK if slot.item_bytes or bounced else BURST, transfer.nbytes - moved)
            if _bounces(file, address, size):
                size = min(CHUNK, size)
            if device is not None:
                address = device.fetch(moved, size) if transfer.write else device.host_address(moved)
            zeros, size = _alike(transfer, place, address, size)
            if zeros:
                if not transfer.write:
                    ctypes.memset(address, 0, size)
            elif slot.item_bytes:
                stored += self._move_packed(transfer, place, address, size)
            else:
                stored += self._move_whole(transfer, place, address, size)
            if device is not None and not transfer.write:
                device.deliver(moved, size)
            moved += size
            if limit and (ahead := stored / limit - (time.perf_counter() - begin)) > 0:
                time.sleep(ahead)
        if not file.direct:
            _drop_cache(file, slot.offset + transfer.start, transfer.nbytes, transfer.write)
        if transfer.write:
            self.stats.written_bytes += stored
            self.stats.unworn_bytes += 0 if file.worn else stored
        else:
            self.stats.read_bytes += stored

    def _move_whole(self, transfer: Transfer, place: int, address: int, size: int) -> int:
        """Move bytes unpacked, at most a chunk if a bounce buffer is needed; return their number."""
        slot, memory = transfer.slot, _memory(address, size)
        if transfer.write:
            for start, checksum in _checksums(memory, place):
                slot.sums[start // CHUNK], slot.packed_bytes[start // CHUNK] = checksum, 0
            self._write_chunk(slot.file, slot.offset + place, memory, bounced=_bounces(slot.file, address, size))
            return size
        self._read_chunk(slot.file, slot.offset + place, address, size)
        for start, checksum in _checksums(memory, place):
            _verify(slot, start, checksum)
        return size

    def _move_packed(self, transfer: Transfer, place: int, address: int, size: int) -> int:
        """Move one chunk packed, or unpacked if that is no larger; return the bytes moved to or from the medium.

        The checksum covers the bytes on the medium, so the unpacked bytes are those that were written.
        """
        slot, chunk = transfer.slot, place // CHUNK
        if transfer.write:
            self._packed = self._packed or bytearray(CHUNK)
            length = pack_page(address, size, slot.item_bytes, self._packed)
            length = length if padded(length) < size else 0  # whole blocks are written
        else:
            length = slot.packed_bytes[chunk]
        if not length:
            return self._move_whole(transfer, place, address, size)
        if transfer.write:
            slot.packed_bytes[chunk] = length
            slot.sums[chunk] = xxhash.xxh3_64_intdigest(memoryview(self._packed)[:length])
            self._write_chunk(slot.file, slot.offset + place, memoryview(self._packed)[:length], bounced=True)
            return padded(length)
        whole = memoryview(self._bounce)[: padded(length)]
        _read_fully(slot.file, [whole], slot.offset + place)
        _verify(slot, place, xxhash.xxh3_64_intdigest(whole[:length]))
        try:
            unpack_page(whole[:length], address, size, slot.item_bytes)
        except DamagedPageError as error:
            raise CorruptPageError(slot.file.path, slot.offset + place, f"{slot.file.path}: {error}") from error
        return padded(length)

    def _write_chunk(self, file: PageFile, offset: int, memory: memoryview, *, bounced: bool) -> None:
        size = len(memory)
        if bounced:
            self._bounce[:size] = memory
            memory = memoryview(self._bounce)[: padded(size)]
        done = 0
        while done < len(memory):
            done += os.pwrite(file.fd, memory[done:], offset + done)

    def _read_chunk(self, file: PageFile, offset: int, address: int, size: int) -> None:
        if file.direct and address % BLOCK:
            whole = memoryview(self._bounce)[: padded(size)]
            _read_fully(file, [whole], offset)
            _memory(address, size)[:] = whole[:size]
            return
        tail = size % BLOCK if file.direct else 0  # the rest of its block is another's memory
        whole = memoryview(self._bounce)[: padded(tail)]
        _read_fully(file, [_memory(address, size - tail), whole], offset)
        _memory(address + size - tail, tail)[:] = whole[:tail]


def _transfer_error(error: OSError, transfer: Transfer) -> PageError:
    verb, slot = "written" if transfer.write else "read", transfer.slot
    failed = page_error(error, slot.file.path, verb, transfer.nbytes)
    if error.errno == errno.EIO and not transfer.write:  # how a controller reports a decayed block
        return CorruptPageError(slot.file.path, slot.offset + transfer.start, str(failed), error.errno)
    return failed


def _bounces(file: PageFile, address: int, size: int) -> bool:
    """Return whether memory must be copied to a buffer of whole, aligned blocks on its way to a file."""
    return file.direct and bool(address % BLOCK or size % BLOCK)


def _alike(transfer: Transfer, place: int, address: int, size: int) -> tuple[bool, int]:
    """Return whether the chunk at byte `place` of the slot is all zeros, and the end (up to `size`) of the
    following chunks that are alike.

    Written chunks of zeros are only recorded in the slot.
    """
    slot = transfer.slot

    def zeros(start: int) -> bool:
        chunk = (place + start) // CHUNK
        if not transfer.write:
            return slot.packed_bytes[chunk] == ZEROS
        found = _all_zeros(address + start, min(CHUNK, size - start))
        if found:
            slot.sums[chunk], slot.packed_bytes[chunk] = None, ZEROS
        return found

    first, end = zeros(0), CHUNK
    while end < size and zeros(end) == first:
        end += CHUNK
    return first, min(end, size)


def _all_zeros(address: int, nbytes: int) -> bool:
    """Return whether all bytes are 0. Each byte is compared with the next one, up to the first that differs."""
    return ctypes.c_ubyte.from_address(address).value == 0 and not _memcmp(address, address + 1, nbytes - 1)


def _checksums(memory: memoryview, place: int) -> Iterator[tuple[int, int]]:
    """Yield place and checksum of each chunk of `memory`, which starts at byte `place` of its slot."""
    for start in range(0, len(memory), CHUNK):
        yield place + start, xxhash.xxh3_64_intdigest(memory[start : start + CHUNK])


def _verify(slot: Slot, place: int, checksum: int) -> None:
    expected = slot.sums[place // CHUNK]
    if expected is not None and checksum != expected:
        raise CorruptPageError(
            slot.file.path,
            slot.offset + place,
            f"{slot.file.path}: the block at offset {slot.offset + place} is not what was written "
            f"(checksum {checksum:016x}, expected {expected:016x}); the medium may be failing",
        )


def _read_fully(file: PageFile, into: list[memoryview], offset: int) -> None:
    """Fill the parts one after another. Raises CorruptPageError if the file ends too early."""
    left = [chunk for chunk in into if len(chunk)]
    while left:
        count = os.preadv(file.fd, left, offset)
        if count == 0:
            raise CorruptPageError(
                file.path, offset, f"{file.path} ends at offset {offset}; it was truncated or replaced"
            )
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _drop_cache(file: PageFile, offset: int, nbytes: int, written: bool) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    if written:
        os.fdatasync(file.fd)
    with contextlib.suppress(OSError):
        os.posix_fadvise(file.fd, offset, padded(nbytes), os.POSIX_FADV_DONTNEED)
