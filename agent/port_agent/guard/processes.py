"""The processes inside one budget: memory that their libraries share, created before the program starts and read at its
end.

It is an unnamed file held by the program's own process, so it vanishes with the last of them, however they end.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from port_agent.guard.memory import PauseState, smallest_block_bytes
from port_agent.malloc import preload_environment

VERSION = 2
"""PROCESSES_VERSION in processes.h."""
SLOTS = 256
"""PROCESS_SLOTS."""
VARIABLE = "PORT_GUARD_PROCESSES"
_PATH_BYTES = 4096
_UNLIMITED = 2**64 - 1
_STARTED, _GUARDED, _ENDED = 1, 2, 3
_FILE = "port-agent-processes"
_LOW_DESCRIPTORS = 64
"""Programs rely on small descriptor numbers."""


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process inside a budget took."""

    pid: int
    name: str
    """The command of the process, or its beginning."""
    guarded: bool
    """Whether the budget was enforced for it; otherwise it was measured from outside."""
    peak_bytes: int
    """Peak of the process's own share: pages that processes share are divided among them."""
    read_faults: int
    write_faults: int
    read_bytes: int
    written_bytes: int


class _Slot(ctypes.Structure):
    """struct process_slot."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("state", "pid", "guarded", "measures", "pause", "reserved")),
        *(
            (name, ctypes.c_uint64)
            for name in ("now_bytes", "peak_bytes", "rest_bytes", "tensor_bytes", "wanted_bytes")
        ),
        *((name, ctypes.c_uint64) for name in ("read_faults", "write_faults", "read_bytes", "written_bytes")),
        ("name", ctypes.c_char * 96),
    )


class _Table(ctypes.Structure):
    """struct processes."""

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("first_pid", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("ram_bytes", "tensor_bytes", "smallest_bytes")),
        *((name, ctypes.c_uint64) for name in ("peak_bytes", "peak_tensor_bytes")),
        *((name, ctypes.c_uint64) for name in ("rest_bytes", "needed_bytes", "forgotten")),
        ("replaced", ctypes.c_uint32),
        *((name, ctypes.c_uint32) for name in ("accounted", "paused")),
        ("page_directory", ctypes.c_char * _PATH_BYTES),
        ("preload", ctypes.c_char * _PATH_BYTES),
        ("library_path", ctypes.c_char * _PATH_BYTES),
        ("accounting", ctypes.c_char * (2 * _PATH_BYTES)),
        ("slots", _Slot * SLOTS),
    )


class ProcessTable:
    """The processes of one budget, as each of them reports itself.

    Raises OSError if the file does not exist, or if the program closed it and its descriptor is another file's.
    """

    def __init__(self, path: Path) -> None:
        if not path.readlink().name.startswith(f"memfd:{_FILE}"):
            raise FileNotFoundError(f"{path} is not the table of a budget's processes")
        self._path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ctypes.sizeof(_Table))
        self._table = _Table.from_buffer(self._memory)

    @classmethod
    def create(cls, page_dir: Path, name: str, *, ram_bytes: int | None, tensor_bytes: int | None) -> Self:
        """Create the table for a program that this process becomes, whose children page to `page_dir`.

        `name`: the program's name, usually its command.
        """
        low = os.memfd_create(_FILE, os.MFD_CLOEXEC)
        descriptor = fcntl.fcntl(
            low, fcntl.F_DUPFD, _LOW_DESCRIPTORS
        )  # stays open in the program that this process becomes
        os.close(low)
        os.truncate(descriptor, ctypes.sizeof(_Table))
        made = cls(Path(f"/proc/{os.getpid()}/fd/{descriptor}"))
        table = made._table
        limit = _UNLIMITED if tensor_bytes is None else tensor_bytes
        table.first_pid, table.ram_bytes, table.tensor_bytes = os.getpid(), ram_bytes or 0, limit
        table.smallest_bytes = smallest_block_bytes(tensor_bytes)
        table.page_directory = os.fsencode(page_dir)
        added = preload_environment(None)
        table.preload = os.fsencode(added.get("LD_PRELOAD", "").partition(":")[0])
        table.library_path = os.fsencode(added.get("LD_LIBRARY_PATH", "").partition(":")[0])
        first = table.slots[0]
        first.state, first.pid = _STARTED, os.getpid()
        first.name = os.fsencode(name)[: _Slot.name.size - 1]
        table.version = VERSION
        return made

    @classmethod
    def of_program(cls, pid: int) -> Self:
        """Return the table of a running program.

        Raises FileNotFoundError if the process has none, OSError if it may not be read.
        """
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                return cls(path)
        raise FileNotFoundError(f"process {pid} shares no budget")

    @property
    def path(self) -> Path:
        """Return where the file is."""
        return self._path

    def environment(self) -> dict[str, str]:
        """Return the variables to add for a process inside this budget, with its library preloaded."""
        return {VARIABLE: str(self._path)}

    def account_by(self, words: Sequence[str]) -> None:
        """Set the command to run at the program's end if another program, which does not know of this table, replaced
        it.
        """
        line = b"".join(os.fsencode(word) + b"\0" for word in words)
        if len(line) < 2 * _PATH_BYTES:
            ctypes.memmove(ctypes.addressof(self._table) + _Table.accounting.offset, line, len(line))

    def accounted(self) -> None:
        """Record that the program's figures were reported."""
        self._table.accounted = 1

    @property
    def peak_bytes(self) -> int:
        """Return the peak of all processes together, in bytes."""
        return int(self._table.peak_bytes)

    @property
    def peak_tensor_bytes(self) -> int:
        """Return the peak of the tensors of all processes together, in bytes."""
        return int(self._table.peak_tensor_bytes)

    @property
    def rest_bytes(self) -> int:
        """Return the peak of memory other than tensors, of all processes together, in bytes."""
        return int(self._table.rest_bytes)

    @property
    def needed_bytes(self) -> int:
        """Return the budget that would have sufficed, in bytes; 0 if this one did."""
        return int(self._table.needed_bytes)

    @property
    def forgotten(self) -> int:
        """Return the number of processes whose figures were lost."""
        return int(self._table.forgotten)

    def program(self) -> ProcessUse | None:
        """Return the figures of the program's own process."""
        return next((use for use in self._uses() if use.pid == self._table.first_pid), None)

    def children(self) -> tuple[ProcessUse, ...]:
        """Return the figures of all other processes, in the order of their slots."""
        return tuple(use for use in self._uses() if use.pid != self._table.first_pid)

    def _uses(self) -> list[ProcessUse]:
        return [_use_of(slot) for slot in self._table.slots if _STARTED <= slot.state <= _ENDED]

    def pause(self) -> None:
        """Pause all processes: from now on, code that touches a tensor waits, and resident tensors are evicted."""
        self._table.paused = PauseState.RELEASED

    def resume(self) -> None:
        """Let all processes continue."""
        self._table.paused = 0

    @property
    def held(self) -> bool:
        """Return whether all processes that have tensors have paused."""
        return all(slot.pause >= PauseState.HELD for slot in self._pausable())

    @property
    def released(self) -> bool:
        """Return whether no tensor is resident."""
        return all(slot.pause == PauseState.RELEASED for slot in self._pausable())

    @property
    def now_bytes(self) -> int:
        """Return the bytes that all processes hold now."""
        return sum(int(slot.now_bytes) for slot in self._table.slots if _STARTED <= slot.state < _ENDED)

    @property
    def tensor_bytes(self) -> int:
        """Return the bytes of tensors resident now, in all processes."""
        return sum(int(slot.tensor_bytes) for slot in self._table.slots if _STARTED <= slot.state < _ENDED)

    @property
    def written_bytes(self) -> int:
        """Return the bytes that all processes wrote to their page files."""
        return sum(int(slot.written_bytes) for slot in self._table.slots)

    def _pausable(self) -> list[Any]:
        return [slot for slot in self._table.slots if slot.state == _GUARDED and slot.measures]


def _use_of(slot: Any) -> ProcessUse:
    figures = {
        name: int(getattr(slot, name)) for name in ProcessUse.__dataclass_fields__ if name not in ("name", "guarded")
    }
    return ProcessUse(name=slot.name.decode(errors="replace"), guarded=bool(slot.guarded), **figures)
