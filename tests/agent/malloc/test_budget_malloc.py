"""The allocator from C: the whole malloc family under the preload, and the block cache under sanitizers."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.malloc import preload_environment, preload_path
from tests.agent.native_programs import (
    COMPILER,
    FIXED_LAYOUT,
    LIBRARY,
    MALLOC,
    WARNINGS,
    compile_program,
    compile_sanitized,
)
from tests.attack.outcome import AttackOutcome, Survived

pytestmark = pytest.mark.process

SOURCES = Path(__file__).parent / "c"
CACHE = [*sorted(MALLOC.glob("block_*.c")), MALLOC / "huge_pages.c"]

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
needs_preload = pytest.mark.skipif(
    preload_path() is None, reason="the allocator was not built (no glibc or no compiler)"
)

CASES = [
    "alignments",
    "errors",
    "resizing",
    "zeroes",
    "threads",
    "forking",
    "double_free",
    "data_limit",
    "many",
    "reserving",
]


def run_family(
    program: Path, case: str, limit_bytes: int | None, hard_limit_bytes: int | None = None
) -> subprocess.CompletedProcess[str]:
    variables = preload_environment(limit_bytes, hard_limit_bytes=hard_limit_bytes)
    return subprocess.run([program, case], env={**os.environ, **variables}, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(tmp_path_factory.mktemp("malloc") / "family", SOURCES / "family.c")


@pytest.mark.process
@needs_compiler
def test_every_case_is_run_below(family: Path) -> None:
    listed = subprocess.run([family], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(listed) == sorted(CASES)


@pytest.mark.sample(8)
@needs_compiler
@needs_preload
@pytest.mark.parametrize("limit_bytes", [None, 20_000_000, 1_000_000, 0])
@pytest.mark.parametrize("case", ["alignments", "errors", "resizing", "zeroes", "threads", "forking", "many"])
def test_malloc_family(family: Path, case: str, limit_bytes: int | None) -> None:
    result = run_family(family, case, limit_bytes)
    assert result.returncode == 0, result.stderr


@needs_compiler
@needs_preload
def test_kernel_limit_on_data_empties_the_cache(family: Path) -> None:
    result = run_family(family, "data_limit", None)
    assert result.returncode == 0, result.stderr


@needs_compiler
@needs_preload
def test_hard_limit_is_seen_by_malloc(family: Path) -> None:
    result = run_family(family, "many", None, hard_limit_bytes=100 << 20)
    assert result.returncode == 1
    assert "(errno 12)" in result.stderr


@needs_compiler
@needs_preload
def test_double_free_stops_the_process_with_a_message(family: Path) -> None:
    result = run_family(family, "double_free", None)
    assert result.returncode == -signal.SIGABRT
    assert "freed twice" in result.stderr


@pytest.mark.process
@needs_compiler
def test_the_allocator_compiles_without_warnings(tmp_path: Path) -> None:
    compile_program(tmp_path / "allocator.so", "-shared", "-fPIC", *LIBRARY)


def run_stress(directory: Path, rounds: int, *flags: str) -> subprocess.CompletedProcess[str]:
    program = compile_program(directory / "stress", *flags, f"-I{MALLOC}", SOURCES / "stress.c", *CACHE)
    command: list[str | Path] = [*(FIXED_LAYOUT if flags else []), program, str(rounds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.process
@needs_compiler
def test_threads_on_one_cache(tmp_path: Path) -> None:
    result = run_stress(tmp_path, 400)
    assert result.returncode == 0, result.stderr


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
FLAGS_OF_A_BLOCK = """
import ctypes
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
address, inside = malloc(8 << 20), False
for line in open("/proc/self/smaps"):
    words = line.split()
    if not words[0].endswith(":"):
        start, stop = (int(word, 16) for word in words[0].split("-"))
        inside = start <= address < stop
    elif inside and words[0] == "VmFlags:":
        print("hg" in words, "nh" in words)
"""


@needs_preload
@pytest.mark.skipif(
    os.geteuid() != 0 or not HUGE_PAGES.exists(), reason="needs root, to show another kernel's huge pages"
)
@pytest.mark.parametrize(
    ("nbytes", "expected"), [(2 << 20, "True False"), (32 << 20, "False True"), (512 << 20, "False True")]
)
def test_the_kernel_is_asked_for_huge_pages_that_a_block_fills(nbytes: int, expected: str, tmp_path: Path) -> None:
    """Pages of 16 KiB make huge ones of 32 MiB: what a block leaves untouched of them would pass a budget."""
    (tmp_path / "hpage_pmd_size").write_text(f"{nbytes}\n")
    (tmp_path / "block.py").write_text(FLAGS_OF_A_BLOCK)
    words = f"mount --bind {tmp_path}/hpage_pmd_size {HUGE_PAGES} && exec {sys.executable} {tmp_path}/block.py"
    variables = preload_environment(None)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", words], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.process
@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="the linker's --wrap")
def test_moves_that_the_kernel_refuses(tmp_path: Path) -> None:
    result = run_stress(tmp_path, 2500, "-DREFUSE", "-Wl,--wrap=mremap,--wrap=mprotect")
    assert result.returncode == 0, result.stderr


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(("sanitizer", "name"), [("thread", "TSan"), ("address,undefined", "ASan + UBSan")])
def test_threads_on_one_cache_under_a_sanitizer(tmp_path: Path, sanitizer: str, name: str, survived: Survived) -> None:
    rounds = 5000
    result = run_stress(tmp_path, rounds, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    failed = result.returncode != 0 or "WARNING: ThreadSanitizer" in result.stderr
    harmed = (result.stderr[-2000:],) if failed else ()
    survived(
        AttackOutcome(f"{name}, allocator, threads", rounds, 0 if harmed else rounds, harmed, "rounds of each thread")
    )


@needs_compiler
@needs_preload
@pytest.mark.long
def test_malloc_family_under_sanitizers(tmp_path: Path, survived: Survived) -> None:
    """All C of the package: the family, the blocks, the reservations; what is no block has
    the sanitizer's red zones.
    """
    program = compile_sanitized(tmp_path / "family", SOURCES / "family.c")
    harmed = []
    # The sanitizer's own memory counts against the limit on data; an abort is what the case of a double free wants.
    tried = [
        (case, limit) for case in sorted(set(CASES) - {"data_limit", "double_free"}) for limit in (0, 1 << 20, 1 << 40)
    ]
    for case, limit in tried:
        environment = {**os.environ, "PORT_MALLOC_LIMIT": str(limit)}
        command: list[str | Path] = [*FIXED_LAYOUT, program, case]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if result.returncode:
            harmed.append(f"{case}, {limit} bytes: {result.stderr[-2000:]}")
    clean = len(tried) - len(harmed)
    survived(
        AttackOutcome(
            "ASan + UBSan, allocator, family", len(tried), clean, tuple(harmed), "cases and limits of the cache"
        )
    )


ARM_COMPILER, ARM_EMULATOR, ARM_ROOT = "aarch64-linux-gnu-gcc", "qemu-aarch64-static", Path("/usr/aarch64-linux-gnu")


@pytest.mark.long
@pytest.mark.skipif(
    not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR) and ARM_ROOT.is_dir()),
    reason="needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static",
)
def test_malloc_family_on_emulated_arm(tmp_path: Path) -> None:
    library, program = tmp_path / "allocator.so", tmp_path / "family"
    for target, arguments in ((library, ["-shared", "-fPIC", *LIBRARY]), (program, [SOURCES / "family.c"])):
        subprocess.run([ARM_COMPILER, *WARNINGS, "-o", target, *arguments], check=True)
    variables = ["-E", f"LD_PRELOAD={library}", "-E", "PORT_MALLOC_LIMIT=20000000"]
    # The emulator does not enforce RLIMIT_DATA, and reports an abort in its own way.
    for case in sorted(set(CASES) - {"data_limit", "double_free", "reserving"}):
        command: list[str | Path] = [ARM_EMULATOR, "-L", ARM_ROOT, *variables, program, case]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, f"{case}: {result.stderr}"
