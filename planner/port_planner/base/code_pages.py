"""Return to the kernel the code that a process has run and will not run again, and the constants that it has read.

Importing torch touches 65 to 100 MiB of code, and 10 MiB of constants.

Both are mapped from files and never changed, so their pages can go at any time; pages that are needed again come back
from the page cache, 30 MiB of code for a training step. The kernel gives code back, too, when memory is short; a budget
cannot wait for that.

Linux 6.18 has freshly installed libraries in large folios, up to 2 MiB each, and maps a folio as a whole when one of its
pages is used: 85 MiB for a training step. It is made to forget these, and reads what runs again in small ones.
"""

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from port_planner.base.process_memory import PAGE_BYTES

_MADV_DONTNEED = 4

_libc = ctypes.PyDLL(None)
"""The C library. Calls keep the interpreter's lock, so no other Python thread unmaps anything between two of them."""
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.readlink.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
_libc.readlink.restype = ctypes.c_ssize_t
_A_BYTE = ctypes.create_string_buffer(1)
"""Buffer for the path of a mapped file, of which only the existence matters.

It was written, so it lies on a page of this process's own.
"""

_NO_FILES = ("/dev/", "/memfd:", "/SYSV", "/anon_hugepage")
"""Prefixes of entries that Linux lists like the path of a file."""

_DELETED = " (deleted)"

_LIBRARY_BYTES = 4 << 20
"""Files of code from this size on are asked how their pages lie."""

_LOOKS = 16
_FOLIO_BYTES = 256 << 10
"""A page that brings so many with it lies in a large folio; otherwise the kernel maps at most 64 KiB around it."""

_looked_at: set[str] = set()
"""Files whose folios this process has seen."""

_CODE, _CONSTANTS = "r-xp", "r--p"
"""Permissions of private mappings that are never written."""

_OWN_PAGES = frozenset(("Anonymous", "Swap"))
"""Smaps fields that count pages no longer identical to the file: relocated code, a debugger's breakpoints.

Unmapping would lose them.
"""


def release_code_pages() -> None:
    """Unmap the resident pages of code and constants that this process has mapped from executable files.

    Linux only; nothing happens elsewhere.

    A mapping with pages of its own is left alone. Files that lie in large folios leave the page cache, but for what
    another process has mapped.
    """
    for path in large_code_files(_release(code_mappings)) - _looked_at:
        _looked_at.add(path)
        with contextlib.suppress(OSError, ValueError):  # replaced, or shorter meanwhile
            forget_large_folios(path)


def release_data_pages() -> None:
    """Unmap the resident pages of all other privately mapped files, such as weights, if this process never wrote to
    them.

    This works only on Linux, and does nothing elsewhere.
    """
    _release(data_mappings)


def release_shared_pages(in_ram: Callable[[Path], bool]) -> None:
    """Unmap the resident pages of files that this process has mapped to share, such as numpy's
    memmap or tables of Arrow.

    This works only on Linux, and does nothing elsewhere. Written pages stay in the page cache, which the kernel writes
    to disk. Files that are `in_ram` stay mapped.
    """
    if sys.platform != "linux":
        return
    for start, stop, path in shared_mappings(Path("/proc/self/maps").read_text()):
        if not in_ram(Path(path)):
            _give_back(start, stop)


def shared_mappings(maps: str) -> list[tuple[int, int, str]]:
    """Return address range and path of each mapping that shares a named file, from the text of a /proc/PID/maps."""
    return [
        (mapping.start, mapping.stop, mapping.path.removesuffix(_DELETED))
        for mapping in file_mappings(maps)
        if mapping.shared and not mapping.path.startswith(_NO_FILES)
    ]


@dataclass(frozen=True, slots=True)
class FileMapping:
    """Addresses from `start` to `stop` that show a file from byte `offset`; `path` is the one that Linux lists."""

    start: int
    stop: int
    offset: int
    path: str
    shared: bool


def file_mappings(maps: str) -> Iterator[FileMapping]:
    """Yield a process's mappings of files, from the text of its /proc/PID/maps (proc_pid_maps(5))."""
    for line in maps.splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith("/"):
            start, _, stop = words[0].partition("-")
            yield FileMapping(int(start, 16), int(stop, 16), int(words[2], 16), words[5], words[1].endswith("s"))


def _release(mappings: Callable[[str], list[tuple[int, int]]]) -> str:
    """Unmap what `mappings` finds in this process's smaps, and return that text; empty if nothing was unmapped."""
    if sys.platform != "linux":
        return ""
    try:
        own_page = _own_page()
        described = Path("/proc/self/smaps").read_text()
    except OSError:  # a sandbox without them
        return ""
    if not tells_own_pages(described, ctypes.addressof(own_page)):
        return ""
    for start, stop in mappings(described):
        _give_back(start, stop)
    return described


def large_code_files(smaps: str) -> set[str]:
    """Return the paths of large files of which a process has mapped code, from an smaps text."""
    return {m.path for m in _private_mappings(smaps) if m.permissions == _CODE and m.stop - m.start >= _LIBRARY_BYTES}


def forget_large_folios(path: str) -> bool:
    """Make the kernel drop a file from its page cache if some of it lies in large folios; return whether it was asked to.

    Dropped are clean pages that no process has mapped; see posix_fadvise(2). Raises OSError and ValueError.
    """
    with open(path, "rb") as file:
        with mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as pages:
            most_bytes = max(_mapped_by_reading(pages, len(pages) * k // _LOOKS) for k in range(_LOOKS))
        large = most_bytes >= _FOLIO_BYTES
        if large:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return large


def _mapped_by_reading(pages: mmap.mmap, offset: int) -> int:
    """Return how many bytes of files this process has mapped more after it read a byte."""
    before = _file_bytes()
    pages[offset]
    return _file_bytes() - before


def _file_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[2]) * PAGE_BYTES


def _give_back(start: int, stop: int) -> None:
    """Unmap the resident pages of a file's mapping if the kernel still has it (proc_pid_map_files(5)).

    Garbage collection or another thread may have unmapped the file since the kernel's list was read, and allocated at
    the same address: such memory would be lost.
    """
    if _libc.readlink(b"/proc/self/map_files/%x-%x" % (start, stop), _A_BYTE, 1) == 1:
        _libc.madvise(start, stop - start, _MADV_DONTNEED)


@cache
def _own_page() -> ctypes.Array[ctypes.c_char]:
    """Return the byte that this process wrote to its private mapping of a file, which makes the page its own.

    Raises OSError.
    """
    with open("/proc/self/exe", "rb") as file:
        mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    mapping[0:1] = mapping[0:1]
    return (ctypes.c_char * 1).from_buffer(mapping)  # keeps the mapping


def tells_own_pages(smaps: str, written: int) -> bool:
    """Return whether an smaps text reports private pages for a file's mapping at an address that this process wrote.

    An emulator of user programs (qemu-user, in Docker's containers for another architecture) never reports any for
    files, although it does for stack and heap: relocated code would be mistaken for the file's, and lost.
    """
    return any(m.own_kb > 0 for m in _file_mappings(smaps) if m.start <= written < m.stop)


def code_mappings(smaps: str) -> list[tuple[int, int]]:
    """Return the address ranges of clean private mappings of executable files: code, and
    constants that are read with it.

    Parses the text of /proc/PID/smaps. Files without executable mappings, such as weights, are not included.
    """
    found = _private_mappings(smaps)
    executable = _executable(found)
    return [
        (m.start, m.stop)
        for m in found
        if m.path in executable and m.permissions in (_CODE, _CONSTANTS) and m.own_kb == 0
    ]


def data_mappings(smaps: str) -> list[tuple[int, int]]:
    """Return the address ranges of clean private mappings of files without executable mappings, from an smaps text."""
    found = _private_mappings(smaps)
    executable = _executable(found)
    return [(m.start, m.stop) for m in found if m.path not in executable and m.own_kb == 0]


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A mapping of a file; bytes from `start` to `stop`."""

    start: int
    stop: int
    permissions: str
    path: str
    own_kb: int
    """Pages of its own, resident or swapped out."""


def _executable(mappings: list[_Mapping]) -> set[str]:
    return {mapping.path for mapping in mappings if mapping.permissions == _CODE}


def _private_mappings(smaps: str) -> list[_Mapping]:
    return [mapping for mapping in _file_mappings(smaps) if mapping.permissions.endswith("p")]


def _file_mappings(smaps: str) -> Iterator[_Mapping]:
    """Yield the mappings of files.

    Most of an smaps text describes others, one for each block of tensors, and is skipped.
    """
    end = 0
    while (path := smaps.find("/", end)) >= 0:
        begin, end = smaps.rfind("\n", 0, path) + 1, _line_end(smaps, path)
        words, own_kb = smaps[begin:end].split(maxsplit=5), 0
        while end < len(smaps):
            begin, next_end = end + 1, _line_end(smaps, end + 1)
            field, _, value = smaps[begin:next_end].partition(":")
            if " " in field:  # the next mapping
                break
            own_kb += int(value.split()[0]) if field in _OWN_PAGES else 0
            end = next_end
        if len(words) == 6 and words[5].startswith("/"):
            start, _, stop = words[0].partition("-")
            yield _Mapping(int(start, 16), int(stop, 16), words[1], words[5], own_kb)


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end
