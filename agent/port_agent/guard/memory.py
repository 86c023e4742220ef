"""Start, read and steer the guarded memory of a process."""

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

from port_agent.malloc import PreloadMode, preload_environment, preload_mode

INTERFACE_VERSION = 4
"""GUARD_INTERFACE_VERSION in guard.h."""
SMALLEST_BLOCK_BYTES = 64 << 10
"""Tensors from this size on are guarded, unless the budget is tiny."""
_SMALLEST_SHARE = 64
"""Under a tiny budget smaller ones are guarded, too: from this part of it on."""
_UNLIMITED = 2**64 - 1
_PENDING_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class GuardCounters:
    """What happened since the start; bytes are of whole pages. In the order of `struct guard_counters`."""

    resident_bytes: int
    peak_resident_bytes: int
    limit_bytes: int
    """2**64 - 1: none."""
    live_bytes: int
    """Of blocks in use, resident or not."""
    live_blocks: int
    read_faults: int
    """Accesses that brought a block."""
    write_faults: int
    """First writes to a block whose page is up to date."""
    fault_ns: int
    """Spent in both, by all threads together."""
    read_bytes: int
    """From the page file."""
    written_bytes: int
    """To the page file."""
    revived_bytes: int
    """Came back before their pages were given to another block."""
    moved_bytes: int
    """Pages that went from one block to another."""
    fresh_bytes: int
    """Pages taken from the kernel."""
    over_bytes: int
    """The most by which what had to be resident passed the limit."""
    kernel_calls: int
    """System calls whose buffers were brought and kept."""
    file_bytes: int
    """Reserved in the page file."""
    peak_live_bytes: int
    rest_bytes: int
    """Of the process beside blocks: Python, libraries, what the program keeps."""
    peak_rest_bytes: int


class PauseState(enum.IntEnum):
    """How far a process has stopped (enum pause_state in processes.h)."""

    RUNS = 0
    HELD = 1
    """Who touches a tensor waits."""
    RELEASED = 2
    """And nothing of tensors is resident."""


class MappingKind(enum.Enum):
    """What lies below whole pages of a private mapping of a file. As `enum mapping_kind`."""

    NONE = 0
    """Another block, or more mappings than can be watched."""
    FILE_PAGES = 1
    OWN_MEMORY = 2
    """They were written: a block like others."""


class _RawCounters(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in GuardCounters.__dataclass_fields__)


class GuardedMemory:
    """The guarded memory that this process was started with; see `active_guard`."""

    def __init__(self, process: ctypes.CDLL) -> None:
        self._process = process  # without the GIL: a call may wait for a page
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
        for name in ("take_from_file", "is_of_file", "drop_pages", "unwritten", "drop", "fill"):
            getattr(process, f"port_guard_{name}").restype = ctypes.c_bool
        for name in ("take_from_file", "is_of_file", "drop_pages"):
            getattr(process, f"port_guard_{name}").argtypes = [address]
        for name in ("unwritten", "drop"):
            getattr(process, f"port_guard_{name}").argtypes = [address, ctypes.c_uint32]
        process.port_guard_copy.argtypes = [address, size, address, size, ctypes.c_bool]
        process.port_guard_copy.restype = ctypes.c_bool
        for name in ("set_limit", "set_process_limit"):
            getattr(process, f"port_guard_{name}").argtypes = [ctypes.c_size_t]

    @classmethod
    def of_this_process(cls) -> Self | None:
        """Return it if it was started in this process, in a version that this code knows."""
        if sys.platform != "linux":
            return None
        process = ctypes.CDLL(None)
        if not hasattr(process, "port_guard_version") or process.port_guard_version() != INTERFACE_VERSION:
            return None
        process.port_guard_active.restype = ctypes.c_bool
        return cls(process) if process.port_guard_active() else None

    def counters(self) -> GuardCounters:
        """Return all counters, read at one instant."""
        raw = _RawCounters()
        self._process.port_guard_counters(ctypes.byref(raw))
        return GuardCounters(**{name: getattr(raw, name) for name in GuardCounters.__dataclass_fields__})

    def set_limit(self, limit_bytes: int) -> None:
        """Keep at most so many bytes of tensors resident from now on."""
        self._process.port_guard_set_limit(limit_bytes)

    def set_process_limit(self, limit_bytes: int) -> None:
        """Keep the resident memory of the whole process below so many bytes: tensors leave for what the rest takes."""
        self._process.port_guard_set_process_limit(limit_bytes)

    def bring(self, address: int) -> bool:
        """Have the block at `address` resident; return False where none lies there."""
        return bool(self._process.port_guard_bring(address))

    def write_back(self, address: int) -> bool:
        """Write the block at `address` to its page, so that it can leave for nothing; return whether it was dirty."""
        return bool(self._process.port_guard_write_back(address))

    def evict(self, address: int) -> bool:
        """Have the block at `address` leave; return whether it is away."""
        return bool(self._process.port_guard_evict(address))

    def usable_bytes(self, address: int) -> int:
        """Return how many bytes the block that begins at `address` has, in whole pages; 0 where none begins there."""
        return int(self._process.port_guard_usable(address))

    def watch(self, address: int, nbytes: int) -> MappingKind:
        """Watch whole pages of a private mapping of a file: from their next write on they are a block like others."""
        return MappingKind(self._process.port_guard_watch(address, nbytes))

    def take_from_file(self, address: int) -> bool:
        """Have watched pages at `address`, which are or were written, be a block like others; return whether one is there."""
        return bool(self._process.port_guard_take_from_file(address))

    def is_of_file(self, address: int) -> bool:
        """Return whether watched pages at `address` are still what their file holds."""
        return bool(self._process.port_guard_is_of_file(address))

    def drop_pages(self, address: int) -> bool:
        """Give back watched pages that their file holds; return whether it does."""
        return bool(self._process.port_guard_drop_pages(address))

    def seal(self, address: int) -> int | None:
        """Close a block for writing until somebody does, and return how often that happened before.

        None where it cannot be closed: no block lies there, or a system call writes it.
        """
        writes = int(self._process.port_guard_seal(address))
        return None if writes < 0 else writes

    def unwritten(self, address: int, writes: int) -> bool:
        """Return whether nobody wrote a block since `seal` returned `writes`."""
        return bool(self._process.port_guard_unwritten(address, writes))

    def drop(self, address: int, writes: int) -> bool:
        """Give up what a block holds, unless somebody wrote it since `seal` returned `writes`, or it is away.

        Whoever touches it before `fill` ends the process, by name.
        """
        return bool(self._process.port_guard_drop(address, writes))

    def fill(self, address: int, source: int, nbytes: int) -> bool:
        """Have a block that was dropped hold `nbytes` from `source`; return whether it was.

        A block at `source` that has the same size gives up its pages: it must not be touched afterwards.
        """
        return bool(self._process.port_guard_fill(address, source, nbytes))

    def held_bytes(self) -> int:
        """Return what blocks that are resident hold now."""
        return int(self._process.port_guard_held_bytes())

    def call_when_near(self, what: Callable[[], None]) -> None:
        """Have the main thread call `what` between two of its lines, once blocks hold half of the limit. It must not raise."""

        def call(_: int | None) -> int:
            what()
            return 0

        self._when_near = _PENDING_CALL(call)  # kept for as long as it may be called
        self._process.port_guard_call_when_near(ctypes.pythonapi.Py_AddPendingCall, self._when_near)

    def trim(self) -> None:
        """Give back to the system what no block holds."""
        self._process.port_guard_trim()

    def measure_live_bytes(self) -> int:
        """Return the bytes of blocks in use, resident or not; from now on `peak_live_bytes` tells the most that they were."""
        return int(self._process.port_guard_measure_live_bytes())

    def peak_live_bytes(self) -> int:
        """Return the highest bytes of blocks in use since the last `measure_live_bytes`."""
        return int(self._process.port_guard_peak_live_bytes())

    def read_part(self, block: int, start: int, target: int, nbytes: int) -> bool:
        """Copy a part of a block into memory, from its page where it is away; return False where no such part is.

        `start` is a multiple of 1 MiB, and so is the part's end, unless the block ends there.
        """
        return bool(self._process.port_guard_copy(block, start, target, nbytes, False))

    def write_part(self, block: int, start: int, source: int, nbytes: int) -> bool:
        """As `read_part`, from memory into the block."""
        return bool(self._process.port_guard_copy(block, start, source, nbytes, True))

    @contextlib.contextmanager
    def bearing_away(self) -> Iterator[None]:
        """Have blocks that this thread allocates hold nothing and take no memory: `write_part` writes what they hold."""
        self._process.port_guard_bear_away(True)
        try:
            yield
        finally:
            self._process.port_guard_bear_away(False)

    def pause(self) -> None:
        """Have everything leave. From now on, whoever touches what is away waits."""
        self._process.port_guard_pause()

    def resume(self) -> None:
        """Let those that wait go on."""
        self._process.port_guard_resume()

    def watch_line(self, descriptor: int, held: bytes = b"", released: bytes = b"") -> None:
        """Have the commands of `port_agent.worker.protocol` that come there and that nobody reads obeyed all the same; -1: no more.

        `held` and `released` are the answers.
        """
        self._process.port_guard_watch_line(descriptor, held, released)

    @contextlib.contextmanager
    def obeying(self) -> Iterator[None]:
        """Have what is on the line left to this thread for a block, but for a command to go on."""
        self._process.port_guard_line_is_obeyed(True)
        try:
            yield
        finally:
            self._process.port_guard_line_is_obeyed(False)

    def hold_and_say(self) -> None:
        """Have whoever touches a tensor wait, in all processes, and the line `held` sent when this one does. Returns at once.

        Who calls this may not get to run again before all go on: one that waits may have the interpreter's lock.
        """
        self._process.port_guard_pause_and_say(PauseState.HELD)

    def release_and_say(self) -> None:
        """Have all tensors leave besides, and the line `released` sent when this process's have."""
        self._process.port_guard_pause_and_say(PauseState.RELEASED)


@cache
def active_guard() -> GuardedMemory | None:
    """Return the guarded memory if this process was started with it, otherwise None."""
    return GuardedMemory.of_this_process()


def guard_environment(page_dir: Path, *, tensor_bytes: int | None, process_bytes: int | None) -> dict[str, str]:
    """Return the variables to add to a new process's environment so that its tensors are guarded.

    `tensor_bytes`: of tensors that may be resident; None: no limit but what `set_process_limit` says later. `process_bytes`: what
    the allocator of everything else may hold, as in `preload_environment`. Empty where the library cannot be preloaded.
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
    """Return from which size on tensors are guarded under a limit for them; None: there is none."""
    share = SMALLEST_BLOCK_BYTES if tensor_bytes is None else tensor_bytes // _SMALLEST_SHARE
    return max(min(SMALLEST_BLOCK_BYTES, share), _PAGE)
