"""Free the buffer for matrix products that numpy's OpenBLAS maps when it is loaded. RLIMIT_DATA counts it, and a worker
computes nothing with it.

The library frees it on request, and maps another one if a product needs it after all. When the process ends, the
library unmaps the addresses again, so they stay reserved for nothing else to be there.
"""

import ctypes
import functools
import mmap
import os
import re
import sys
from pathlib import Path

from port_planner.base.process_memory import data_bytes

_LIBRARY = re.compile(r"(/\S*libscipy_openblas\S*)$", re.MULTILINE)
_NO_ACCESS = 0
_MAP_FIXED_NOREPLACE = 0x100000
"""Flag of mmap(2): at this address, or not at all."""


@functools.cache
def release_blas_buffer() -> int:
    """Free the buffer of numpy's OpenBLAS, once, and return its bytes.

    Returns 0 if no such library is loaded, or if it was not set to one thread, because it does
    not start its threads again.
    """
    if sys.platform != "linux" or os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        return 0
    found = _LIBRARY.search(Path("/proc/self/maps").read_text())
    if found is None:
        return 0
    library, libc = ctypes.CDLL(found[1]), ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in ("blas_memory_alloc", "blas_memory_free", "blas_shutdown")):
        return 0
    library.blas_memory_alloc.restype = ctypes.c_void_p
    address = library.blas_memory_alloc(0)
    library.blas_memory_free(ctypes.c_void_p(address))
    before = data_bytes()
    library.blas_shutdown()
    freed = before - data_bytes()
    if freed > 0:
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
        how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
        libc.mmap(address, freed, _NO_ACCESS, how, -1, 0)
    return max(freed, 0)
