"""Guarded memory from C: threads that find what they wrote, whatever comes and leaves
meanwhile; also under sanitizers.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.native_programs import COMPILER, FIXED_LAYOUT, INCLUDES, LIBRARY, compile_program, compile_sanitized
from tests.attack.outcome import AttackOutcome, Survived

STRESS = Path(__file__).parent / "c/stress.c"
WORKERS = 4

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no C compiler, or not Linux"),
]


def run_stress(
    folder: Path, rounds: int, *, largest_mib: int = 4, sanitized: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run so many rounds of each of the threads of `c/stress.c`, with allocations of up to `largest_mib`."""
    if sanitized:
        program = compile_sanitized(folder / "stress", STRESS)
    else:
        own = ["-fno-builtin-malloc", "-fno-builtin-calloc", *INCLUDES]
        program = compile_program(folder / "stress", *own, STRESS, *LIBRARY, "-ldl")
    command: list[str | Path] = [*(FIXED_LAYOUT if sanitized else []), program, folder, str(rounds), str(largest_mib)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_threads_find_what_they_wrote(tmp_path: Path) -> None:
    done = run_stress(tmp_path, 200)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_threads_find_what_they_wrote_in_huge_pages(tmp_path: Path) -> None:
    done = run_stress(tmp_path, 200, largest_mib=54)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("sanitized", [False, True], ids=["plain", "ASan + UBSan"])
def test_threads_find_what_they_wrote_in_many_rounds(sanitized: bool, tmp_path: Path, survived: Survived) -> None:
    """ThreadSanitizer does not know that a page's protection orders accesses, and calls all of them races."""
    rounds = 10_000
    done = run_stress(tmp_path, rounds, sanitized=sanitized)
    harmed = (done.stderr[-2000:],) if done.returncode else ()
    name = f"guarded memory, {WORKERS} threads{', ASan + UBSan' if sanitized else ''}"
    survived(AttackOutcome(name, rounds, 0 if harmed else rounds, harmed, "rounds of each thread"))
