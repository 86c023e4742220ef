"""Input and output past the page cache: what a medium itself takes, and no memory for copies."""

import contextlib
import fcntl
import os
import sys

BLOCK = 4096
"""O_DIRECT wants addresses, offsets and lengths that are multiples of the logical block; 4096 suits every medium."""


def padded(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def bypass_page_cache(descriptor: int) -> None:
    """Have an open file's reads and writes reach the medium itself.

    tmpfs and some network file systems do not know how.

    On Linux (O_DIRECT) they must then be in whole blocks of aligned memory.
    """
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        elif hasattr(os, "O_DIRECT"):
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
