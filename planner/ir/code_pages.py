"""Give back the code that a process has run and will not run again.

Importing torch touches 65 to 100 MiB of it.

Code is mapped from files and never changed, so its pages can go at any time; what is needed again comes back from the
page cache, 30 MiB of it for a training step, or up to 85 where Linux 6.18 finds freshly installed libraries there in
large folios and maps each as a whole. The kernel gives code back, too, when memory is short; a budget cannot wait for that.
"""

import ctypes
import sys
from pathlib import Path

_MADV_DONTNEED = 4


def release_code_pages() -> None:
    """Unmap the resident pages of executable file mappings of this process.

    Linux only; nothing happens elsewhere.

    A mapping with pages of its own (relocated code, a debugger's breakpoints) is left alone: those would be lost.
    """
    if sys.platform != "linux":
        return
    try:
        described = Path("/proc/self/smaps").read_text()
    except OSError:  # a sandbox without it
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, stop in code_mappings(described):
        madvise(start, stop - start, _MADV_DONTNEED)


def code_mappings(smaps: str) -> list[tuple[int, int]]:
    """Return the address ranges of clean private executable file mappings.

    They are read from the text of a /proc/PID/smaps.
    """
    found: list[tuple[int, int]] = []
    candidate: tuple[int, int] | None = None
    for line in smaps.splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            start, _, stop = words[0].partition("-")
            from_file = len(words) == 6 and words[5].startswith("/")
            candidate = (int(start, 16), int(stop, 16)) if words[1] == "r-xp" and from_file else None
        elif candidate is not None and words[0] == "Private_Dirty:":
            if words[1] == "0":
                found.append(candidate)
            candidate = None
    return found
