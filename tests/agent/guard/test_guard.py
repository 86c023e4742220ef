"""Guarded memory from C: threads that find what they wrote, whatever comes and leaves meanwhile; also under a sanitizer."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent import guard, malloc
from tests.attack.outcome import AttackOutcome, Survived

SOURCES = [path for room in (guard, malloc) for path in Path(str(room.__file__)).parent.glob("*.c")]
COMPILER = shutil.which("cc") or shutil.which("gcc")
WORKERS = 4

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no C compiler, or not Linux"),
]


def run_stress(folder: Path, rounds: int, *flags: str, largest_mib: int = 4) -> subprocess.CompletedProcess[str]:
    """Run so many rounds of each of the threads of `c/stress.c`, with allocations of up to `largest_mib`, linked with the
    library's sources.
    """
    program, includes = folder / "stress", {f"-I{path.parent}" for path in SOURCES}
    own = Path(__file__).parent / "c/stress.c"
    options = ["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-pthread", "-fno-builtin-malloc", "-fno-builtin-calloc"]
    command = [str(COMPILER), *options, *flags, *includes, str(own), *map(str, SOURCES), "-ldl", "-o", str(program)]
    subprocess.run(command, check=True)
    return subprocess.run([program, folder, str(rounds), str(largest_mib)], capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_threads_find_what_they_wrote(tmp_path: Path) -> None:
    done = run_stress(tmp_path, 200)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_threads_find_what_they_wrote_in_huge_pages(tmp_path: Path) -> None:
    done = run_stress(tmp_path, 200, largest_mib=54)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("-fsanitize=undefined", "-fno-sanitize-recover=all")], ids=["plain", "UBSan"])
def test_threads_find_what_they_wrote_in_many_rounds(
    flags: tuple[str, ...], tmp_path: Path, survived: Survived
) -> None:
    rounds = 10_000
    done = run_stress(tmp_path, rounds, *flags)
    harmed = (done.stderr[-2000:],) if done.returncode else ()
    name = f"guarded memory, {WORKERS} threads{', UBSan' if flags else ''}"
    survived(AttackOutcome(name, rounds, 0 if harmed else rounds, harmed, "rounds of each thread"))
