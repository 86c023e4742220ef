"""C programs of tests, alone or linked with the sources of the preloaded library, also under sanitizers."""

import shutil
import subprocess
from pathlib import Path

from port_agent import guard, malloc

MALLOC = Path(malloc.__file__).parent
GUARD = Path(guard.__file__).parent
LIBRARY = [*sorted(GUARD.glob("*.c")), *sorted(MALLOC.glob("*.c"))]
"""The sources of the preloaded library."""
INCLUDES = [f"-I{GUARD}", f"-I{MALLOC}"]
COMPILER = shutil.which("cc") or shutil.which("gcc")
WARNINGS = ["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-pthread"]
FIXED_LAYOUT = ["setarch", "-R"] if shutil.which("setarch") else []
"""Sanitizers need their shadow at a fixed address, which random layouts of newer kernels can collide with."""
_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
_RENAMED = [
    f"-D{name}=our_{name}" for name in (
        "malloc", "free", "calloc", "realloc", "reallocarray", "posix_memalign", "aligned_alloc", "memalign", "valloc", "pvalloc",
        "malloc_usable_size", "free_sized", "free_aligned_sized", "mmap", "mmap64",
    )
]  # fmt: skip
"""The exported functions under other names: beside those of a sanitizer, which the small requests then go to."""
_LIBC = Path(__file__).parent / "malloc/c/libc.c"


def compile_program(target: Path, *arguments: str | Path) -> Path:
    """Compile with all warnings as errors."""
    command = [str(COMPILER), *WARNINGS, "-o", str(target), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target


def compile_sanitized(target: Path, source: Path) -> Path:
    """Compile a program with the whole library under AddressSanitizer and UBSan."""
    libc = compile_program(target.with_suffix(".libc.o"), *_SANITIZERS, "-c", _LIBC)
    return compile_program(target, *_SANITIZERS, *_RENAMED, *INCLUDES, "-rdynamic", source, *LIBRARY, libc, "-ldl")
