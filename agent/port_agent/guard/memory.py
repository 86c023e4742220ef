"""Start, read and control the guarded memory of a process."""

import contextlib
import ctypes
import enum
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from port_agent.malloc import PreloadMode, preload_environment, preload_mode, preload_path, preload_trouble
from port_planner.base.errors import ExitCode, PortError

INTERFACE_VERSION = 7
"""GUARD_INTERFACE_VERSION in guard.h."""
SMALLEST_BLOCK_BYTES = 64 << 10
"""Tensors of this size and larger are guarded, unless the budget is tiny."""
_SMALLEST_SHARE = 64
"""Divisor of a small budget: tensors of at least this part of it are guarded, even if they are smaller than usual."""
_UNLIMITED = 2**64 - 1
_PENDING_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_PAGE = os.sysconf("SC_PAGE_SIZE")


class GuardError(PortError):
    """Raised when memory cannot be guarded in this process."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class GuardCounters:
    """Counters since the start, in the order of `struct guard_counters`; bytes are of whole pages."""

    resident_bytes: int
    peak_resident_bytes: int
    limit_bytes: int
    """2**64 - 1 means no limit."""
    live_bytes: int
    """Bytes of blocks in use, resident or not."""
    live_blocks: int
    read_faults: int
    """Accesses that brought a block in."""
    write_faults: int
    """First writes to a block whose page was up to date."""
    fault_ns: int
    """Time spent in both kinds of fault, by all threads together."""
    read_bytes: int
    """Bytes read from the page file."""
    written_bytes: int
    """Bytes written to the page file."""
    revived_bytes: int
    """Bytes that came back before their pages were given to another block."""
    moved_bytes: int
    """Pages that went from one block to another."""
    fresh_bytes: int
    """Pages taken from the kernel."""
    over_bytes: int
    """The most by which what had to be resident exceeded the limit."""
    kernel_calls: int
    """System calls whose buffers were made resident and kept."""
    file_bytes: int
    """Reserved in the page file."""
    peak_live_bytes: int
    rest_bytes: int
    """Memory of the process besides blocks: Python, libraries, and the program's own objects."""
    peak_rest_bytes: int
    unguarded_bytes: int
    """Bytes of tensors that stayed in ordinary memory, because the page file could not grow for them."""


class PauseState(enum.IntEnum):
    """How far a process has stopped (enum pause_state in processes.h)."""

    RUNS = 0
    HELD = 1
    """Any code that touches a tensor waits."""
    RELEASED = 2
    """Threads wait, and no tensor memory is resident."""


class MappingKind(enum.Enum):
    """What lies below whole pages of a private mapping of a file, as `enum mapping_kind`."""

    NONE = 0
    """Another block, or more mappings than can be watched."""
    FILE_PAGES = 1
    OWN_MEMORY = 2
    """They were written: a block like any other."""


class _RawCounters(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in GuardCounters.__dataclass_fields__)


class GuardedMemory:
    """The guarded memory of this process; see `active_guard`."""

    def __init__(self, process: ctypes.CDLL, *, adopts: bool = False) -> None:
        self._process = process  # called without the GIL: a call may wait for a page
        self.adopts = adopts
        """Whether it began after the process, which may have made tensors before: `adopt` guards them, too."""
        for name in ("bring", "write_back", "evict"):
            function = getattr(process, f"port_guard_{name}")
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_bool
        process.port_guard_usable.argtypes, process.port_guard_usable.restype = [ctypes.c_void_p], ctypes.c_size_t
        for name in ("held_bytes", "measure_live_bytes", "peak_live_bytes"):
            getattr(process, f"port_guard_{name}").restype = ctypes.c_size_t
        process.port_guard_watch_line.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p]
        process.port_guard_line_is_obeyed.argtypes = [ctypes.c_bool]
        process.port_guard_bear_away.argtypes = [ctypes.c_bool]
        size, address = ctypes.c_size_t, ctypes.c_void_p
        process.port_guard_watch.argtypes = [address, size]
        process.port_guard_seal.argtypes, process.port_guard_seal.restype = [address], ctypes.c_int64
        process.port_guard_fill.argtypes = [address, address, size]
        for name in ("take_from_file", "is_of_file", "unwritten", "drop", "fill"):
            getattr(process, f"port_guard_{name}").restype = ctypes.c_bool
        for name in ("take_from_file", "is_of_file"):
            getattr(process, f"port_guard_{name}").argtypes = [address]
        for name in ("unwritten", "drop"):
            getattr(process, f"port_guard_{name}").argtypes = [address, ctypes.c_uint32]
        process.port_guard_copy.argtypes = [address, size, address, size, ctypes.c_bool]
        process.port_guard_copy.restype = ctypes.c_bool
        process.port_guard_begin.argtypes = [ctypes.c_char_p, size, size]
        process.port_guard_adopt.argtypes, process.port_guard_adopt.restype = [address, size], ctypes.c_bool
        for name in ("set_limit", "set_process_limit"):
            getattr(process, f"port_guard_{name}").argtypes = [ctypes.c_size_t]

    @classmethod
    def of_this_process(cls) -> Self | None:
        """Return it if this process was started with guarded memory, in a version that this code supports."""
        if sys.platform != "linux":
            return None
        process = _preloaded()
        if process is None:
            return None
        process.port_guard_active.restype = ctypes.c_bool
        return cls(process) if process.port_guard_active() else None

    @classmethod
    def begin_late(cls, page_dir: Path, tensor_bytes: int | None) -> Self:
        """Begin guarded memory in a process that was not started with it; otherwise as `begin_guard`.

        Raises GuardError where that is impossible.
        """
        process = _preloaded()
        if process is None:
            path = preload_path() if preload_mode() is PreloadMode.PRELOAD else None
            if path is None:
                raise GuardError(preload_trouble() or "memory can be guarded on Linux with glibc alone")
            try:
                process = ctypes.CDLL(str(path))
            except OSError as refused:
                raise GuardError(f"{path} could not be loaded: {refused}") from refused
        limit = _UNLIMITED if tensor_bytes is None else tensor_bytes
        guard = cls(process, adopts=True)
        error = process.port_guard_begin(os.fsencode(page_dir), limit, smallest_block_bytes(tensor_bytes))
        if error:
            raise GuardError(f"no page file could be made in {page_dir}: {os.strerror(error)}")
        error = process.port_guard_take_over()
        if error:
            guard.end()
            raise GuardError(f"the functions of loaded libraries could not be replaced: {os.strerror(error)}")
        return guard

    def end(self) -> None:
        """Bring everything in and stop guarding: all memory is ordinary from here on."""
        self._process.port_guard_end()

    def counters(self) -> GuardCounters:
        """Return all counters, read at one instant."""
        raw = _RawCounters()
        self._process.port_guard_counters(ctypes.byref(raw))
        return GuardCounters(**{name: getattr(raw, name) for name in GuardCounters.__dataclass_fields__})

    def set_limit(self, limit_bytes: int) -> None:
        """Keep at most this many bytes of tensors resident from now on."""
        self._process.port_guard_set_limit(limit_bytes)

    def set_process_limit(self, limit_bytes: int) -> None:
        """Keep the resident memory of the whole process below this many bytes: tensors are evicted to make space for
        the rest.
        """
        self._process.port_guard_set_process_limit(limit_bytes)

    def lift_limits(self) -> None:
        """Keep all tensors resident from now on, until another limit is set."""
        self.set_process_limit(0)
        self.set_limit(_UNLIMITED)

    def bring(self, address: int) -> bool:
        """Make the block at `address` resident; return False if there is none."""
        return bool(self._process.port_guard_bring(address))

    def write_back(self, address: int) -> bool:
        """Write the block at `address` to its page, so that it can be evicted at no cost;
        return whether it was dirty.
        """
        return bool(self._process.port_guard_write_back(address))

    def evict(self, address: int) -> bool:
        """Evict the block at `address`; return whether it is paged out."""
        return bool(self._process.port_guard_evict(address))

    def usable_bytes(self, address: int) -> int:
        """Return the bytes of the block that begins at `address`, in whole pages; 0 if none begins there."""
        return int(self._process.port_guard_usable(address))

    def watch(self, address: int, nbytes: int) -> MappingKind:
        """Guard whole pages of a private mapping of a file: their place is the file until their next write."""
        return MappingKind(self._process.port_guard_watch(address, nbytes))

    def take_from_file(self, address: int) -> bool:
        """Turn watched pages at `address` that are or were written into a block like any other; return whether there is
        one.
        """
        return bool(self._process.port_guard_take_from_file(address))

    def is_of_file(self, address: int) -> bool:
        """Return whether watched pages at `address` still equal their file."""
        return bool(self._process.port_guard_is_of_file(address))

    def adopt(self, address: int, nbytes: int) -> bool:
        """Guard the whole pages of memory that torch allocated before; return whether they are guarded now."""
        return bool(self._process.port_guard_adopt(address, nbytes))

    def seal(self, address: int) -> int | None:
        """Write-protect a block until its next write, and return the number of earlier writes; None if that is
        impossible.

        It is impossible if there is no block, or while a system call writes to it.
        """
        writes = int(self._process.port_guard_seal(address))
        return None if writes < 0 else writes

    def unwritten(self, address: int, writes: int) -> bool:
        """Return whether a block was not written since `seal` returned `writes`."""
        return bool(self._process.port_guard_unwritten(address, writes))

    def drop(self, address: int, writes: int) -> bool:
        """Discard a block's contents, unless it was written since `seal` returned `writes`, or is paged out.

        An access before `fill` ends the process with an error that names it.
        """
        return bool(self._process.port_guard_drop(address, writes))

    def fill(self, address: int, source: int, nbytes: int) -> bool:
        """Fill a block that was dropped with `nbytes` from `source`; return whether it was dropped.

        A block at `source` of the same size gives up its pages and must not be touched afterwards.
        """
        return bool(self._process.port_guard_fill(address, source, nbytes))

    def held_bytes(self) -> int:
        """Return the bytes that resident blocks hold now."""
        return int(self._process.port_guard_held_bytes())

    def call_when_near(self, what: Callable[[], None]) -> None:
        """Make the main thread call `what` between two of its lines once blocks hold half of the limit.

        `what` must not raise.
        """

        def call(_: int | None) -> int:
            what()
            return 0

        self._when_near = _PENDING_CALL(call)  # kept alive for as long as it may be called
        self._process.port_guard_call_when_near(ctypes.pythonapi.Py_AddPendingCall, self._when_near)

    def trim(self) -> None:
        """Return unused memory to the system."""
        self._process.port_guard_trim()

    def measure_live_bytes(self) -> int:
        """Return the bytes of blocks in use, resident or not, and restart the peak that `peak_live_bytes` returns."""
        return int(self._process.port_guard_measure_live_bytes())

    def peak_live_bytes(self) -> int:
        """Return the highest bytes of blocks in use since the last `measure_live_bytes`."""
        return int(self._process.port_guard_peak_live_bytes())

    def read_part(self, block: int, start: int, target: int, nbytes: int) -> bool:
        """Copy a part of a block into memory, from its page if it is paged out; return False if there is no such part.

        `start` is a multiple of 1 MiB, and so is the part's end, unless the block ends there.
        """
        return bool(self._process.port_guard_copy(block, start, target, nbytes, False))

    def write_part(self, block: int, start: int, source: int, nbytes: int) -> bool:
        """Copy from memory into a part of a block; otherwise as `read_part`."""
        return bool(self._process.port_guard_copy(block, start, source, nbytes, True))

    @contextlib.contextmanager
    def bearing_away(self) -> Iterator[None]:
        """Create the blocks that this thread allocates paged out, without contents or
        memory: `write_part` fills them.
        """
        self._process.port_guard_bear_away(True)
        try:
            yield
        finally:
            self._process.port_guard_bear_away(False)

    def pause(self) -> None:
        """Evict everything. From now on, any code that touches a paged-out block waits."""
        self._process.port_guard_pause()

    def resume(self) -> None:
        """Let the waiting threads continue."""
        self._process.port_guard_resume()

    def watch_line(self, descriptor: int, held: bytes = b"", released: bytes = b"") -> None:
        """Execute the commands of `port_agent.worker.protocol` that arrive on this line even if nobody reads them; -1:
        stop doing so.

        `held` and `released` are the answers to send.
        """
        self._process.port_guard_watch_line(descriptor, held, released)

    @contextlib.contextmanager
    def obeying(self) -> Iterator[None]:
        """Leave the commands on the line to this thread while the block runs, except the command to continue."""
        self._process.port_guard_line_is_obeyed(True)
        try:
            yield
        finally:
            self._process.port_guard_line_is_obeyed(False)

    def hold_and_report(self) -> None:
        """Make any code that touches a tensor wait, in all processes, and send the line `held` when this process does.

        Returns at once.

        The caller may not run again before all continue, because a waiting thread may hold the interpreter's lock.
        """
        self._process.port_guard_pause_and_say(PauseState.HELD)

    def release_and_report(self) -> None:
        """In addition, evict all tensors, and send the line `released` when those of this process are evicted."""
        self._process.port_guard_pause_and_say(PauseState.RELEASED)


def _preloaded() -> ctypes.CDLL | None:
    """Return the functions of the preloaded library, if there is one that this code supports."""
    process = ctypes.CDLL(None)
    supported = hasattr(process, "port_guard_version") and process.port_guard_version() == INTERFACE_VERSION
    return process if supported else None


_begun_late: GuardedMemory | None = None


@cache
def _begun_with_process() -> GuardedMemory | None:
    return GuardedMemory.of_this_process()


def active_guard() -> GuardedMemory | None:
    """Return the guarded memory of this process; None if it has none."""
    return _begun_late or _begun_with_process()


def begin_guard(page_dir: Path, tensor_bytes: int | None) -> GuardedMemory:
    """Begin guarded memory in a process that was not started with it, until `end_guard`.

    `page_dir`: directory of the page file. `tensor_bytes`: limit for resident tensors; None: no limit until another is
    set. Raises GuardError where that is impossible.
    """
    global _begun_late
    _begun_late = GuardedMemory.begin_late(page_dir, tensor_bytes)
    return _begun_late


def end_guard() -> None:
    """End what `begin_guard` began; do nothing if nothing was begun."""
    global _begun_late
    if _begun_late is not None:
        _begun_late.end()
        _begun_late = None


def guard_environment(page_dir: Path, *, tensor_bytes: int | None, process_bytes: int | None) -> dict[str, str]:
    """Return the variables to add to a new process's environment so that its tensors are guarded.

    `tensor_bytes`: limit for resident tensors; None: no limit until `set_process_limit` sets one. `process_bytes`:
    limit of the allocator for everything else, as in `preload_environment`. Empty if the library cannot be preloaded.
    """
    if preload_mode() is not PreloadMode.PRELOAD:
        return {}
    limit = _UNLIMITED if tensor_bytes is None else tensor_bytes
    return {
        **preload_environment(process_bytes),
        "PORT_GUARD_DIRECTORY": str(page_dir),
        "PORT_GUARD_LIMIT": str(limit),
        "PORT_GUARD_SMALLEST": str(smallest_block_bytes(tensor_bytes)),
    }


def smallest_block_bytes(tensor_bytes: int | None) -> int:
    """Return the smallest size of guarded tensors under a limit, in bytes; None: there is no limit."""
    share = SMALLEST_BLOCK_BYTES if tensor_bytes is None else tensor_bytes // _SMALLEST_SHARE
    return max(min(SMALLEST_BLOCK_BYTES, share), _PAGE)
