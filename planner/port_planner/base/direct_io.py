"""I/O that bypasses the page cache, so it measures the medium itself and takes no memory for copies."""

import contextlib
import fcntl
import os
import sys

BLOCK = 4096
"""Block size in bytes.

O_DIRECT needs addresses, offsets and lengths that are multiples of the logical block; 4096 suits every medium.
"""


def padded(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def bypass_page_cache(descriptor: int) -> None:
    """Make reads and writes of an open file bypass the page cache.

    tmpfs and some network file systems do not support it.

    On Linux (O_DIRECT), transfers must then use whole blocks of aligned memory.
    """
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        elif hasattr(os, "O_DIRECT"):
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
