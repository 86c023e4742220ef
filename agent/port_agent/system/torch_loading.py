"""Load torch with a lower peak of resident memory: first its library alone, then what Python needs from it.

Loading the library runs 50 MiB of code once, to register every operator. Its pages are released before Python's part of
torch is imported, so the peak is 188 MiB instead of 223 (torch 2.13, x86-64). As a program
(`python -m port_agent.system.torch_loading`) it prints that peak in bytes. Python's code for the meta device (kernels,
references and decompositions) takes 11 MiB more, and no computation needs it.
"""

import contextlib
import ctypes
import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from port_planner.base.code_pages import release_code_pages
from port_planner.base.process_memory import peak_resident_bytes
from port_planner.torch_compat.loading import without_meta_kernels


def load_torch(*, meta_kernels: bool = False) -> None:
    """Import torch for a process that computes. On Linux, Python's kernels for the meta device
    are left out to save memory.

    Code that needs those kernels imports them later; with `meta_kernels`, they are loaded at once. All objects that
    exist by then are excluded from garbage collection. The two collections at the process's end alone would take a
    third of the import's time.
    """
    load_torch_library()
    if "torch" in sys.modules:
        return
    with contextlib.nullcontext() if meta_kernels else without_meta_kernels(), uncollected():
        importlib.import_module("torch")
    gc.freeze()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection while torch is imported.

    Nothing of it is freed, and collections take a sixth of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def load_torch_library() -> None:
    """Load torch's library, and release the memory that only loading needs; Python's import of torch then follows."""
    found = importlib.util.find_spec("torch")
    if sys.platform == "linux" and "torch" not in sys.modules and found is not None and found.origin:
        with contextlib.suppress(OSError):  # a build with other libraries: Python's import loads them in its own way
            ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"))
            release_code_pages()


if __name__ == "__main__":
    load_torch()
    sys.stdout.write(f"{peak_resident_bytes()}\n")
