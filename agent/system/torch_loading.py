"""Load torch with a lower peak of resident memory.

Its library alone first, then what Python needs of it.

Loading the library runs 50 MiB of code once, to register every operator. Given back before Python's part of torch is
imported, it is not resident beside that: 188 MiB at the peak instead of 223 (torch 2.13, x86-64). As a program
(`python -m agent.system.torch_loading`) it prints that peak in bytes.
"""

import contextlib
import ctypes
import importlib.util
import sys
from pathlib import Path

from planner.ir.code_pages import release_code_pages
from planner.ir.process_memory import peak_resident_bytes


def load_torch() -> None:
    """Import torch, thriftily on Linux; the same torch in any case."""
    load_torch_library()
    importlib.import_module("torch")


def load_torch_library() -> None:
    """Load torch's library, and give back what only loading it needs.

    What is left is Python's import of torch.
    """
    found = importlib.util.find_spec("torch")
    if sys.platform == "linux" and "torch" not in sys.modules and found is not None and found.origin:
        with contextlib.suppress(OSError):  # a build with other libraries: Python's import loads them in its own way
            ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"))
            release_code_pages()


if __name__ == "__main__":
    load_torch()
    sys.stdout.write(f"{peak_resident_bytes()}\n")
