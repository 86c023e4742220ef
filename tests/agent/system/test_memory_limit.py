"""The hard belt of a foreground program."""

import mmap
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from port_agent.system import memory_limit
from port_agent.system.memory_limit import hold_resident, limit_data_of, scope_command, untouched_library_bytes

LIMITED = """
import resource
from port_agent.system.memory_limit import limit_data, widen_data_limit
limit_data({0})
before = resource.getrlimit(resource.RLIMIT_DATA)
widen_data_limit(1 << 20)
print(*before, *resource.getrlimit(resource.RLIMIT_DATA))
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
def test_the_soft_limit_is_lowered_and_widened_within_the_hard_one() -> None:
    code = LIMITED.format(300 << 20)
    hard = 300 << 20 | 1 << 19

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, preexec_fn=bound)
    assert [int(word) for word in done.stdout.split()] == [300 << 20, hard, hard, hard]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED.format(1 << 40)], capture_output=True, text=True, check=True, preexec_fn=bound
    )
    assert [int(word) for word in done.stdout.split()] == [hard] * 4


SMAPS = """\
7f0000000000-7f0000100000 rw-p 00001000 fe:00 1234                       /usr/lib/with space/libtorch_cpu.so
Size:               1024 kB
Rss:                 256 kB
VmFlags: rd wr mr mw
7f0000100000-7f0000200000 r--p 00001000 fe:00 1235                       /usr/lib/libc.so.6
Size:               1024 kB
Rss:                   0 kB
VmFlags:
7f0000200000-7f0000300000 rw-p 00000000 00:00 0
Size:               1024 kB
Rss:                   0 kB
VmFlags:
"""
"""As qemu-user 10 writes it: a mapping that a program may not touch has no flags."""


@pytest.mark.skipif(sys.platform != "linux", reason="smaps is Linux's")
def test_of_what_libraries_may_write_that_is_untouched_which_nothing_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, **_: SMAPS)
    assert untouched_library_bytes() == 768 << 10


def test_no_scope_where_no_manager_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert scope_command(1 << 30, {}) == []


KERNEL = """#!/bin/sh
for word; do case $word in MemoryMax=*) limit=${word#MemoryMax=} ;; esac; done
echo $((limit / PAGE * PAGE))
"""
"""Stands for systemd-run: what the kernel makes of a limit where pages have so many bytes."""


@pytest.mark.process
@pytest.mark.parametrize("page_bytes", [4 << 10, 16 << 10, 64 << 10])
@pytest.mark.parametrize("limit", [512 << 20, (1 << 30) * 105 // 100, 2 * (1 << 30) * 21 // 20])
def test_a_limit_of_whole_pages_is_enforced_whatever_their_size(
    limit: int, page_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    systemd_run = tmp_path / "systemd-run"
    systemd_run.write_text(KERNEL.replace("PAGE", str(page_bytes)))
    systemd_run.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(memory_limit, "PAGE_BYTES", page_bytes)
    monkeypatch.setattr(memory_limit, "_manager_listens", lambda environment: True)
    words = scope_command(limit)
    assert f"MemoryMax={limit // page_bytes * page_bytes}" in words


GROWS = """
import mmap, sys
MIB = 1 << 20
touched, reserved = [], [mmap.mmap(-1, 512 * MIB, flags=mmap.MAP_PRIVATE)]
def grow(mib):
    area = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE)
    touched.append(area)
    for page in range(0, len(area), 4096):
        area[page] = 1
print("begun", flush=True)
for line in sys.stdin:
    try:
        grow(int(line))
        print("grown", flush=True)
    except (OSError, MemoryError):
        print("refused", flush=True)
"""
MIB = 1 << 20


@pytest.fixture
def grower() -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    yield process
    process.communicate("")


def grow(process: "subprocess.Popen[str]", mib: int) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{mib}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
def test_another_process_is_held_at_what_is_resident_not_at_what_is_reserved(
    grower: "subprocess.Popen[str]",
) -> None:
    """Half a gibibyte is mapped and not touched: a limit on address space alone would refuse all, or nothing."""
    bound = resident(grower.pid) + 96 * MIB
    hold_resident(grower.pid, bound)
    assert grow(grower, 64) == "grown"
    hold_resident(grower.pid, bound)
    assert grow(grower, 64) == "refused"
    assert grow(grower, 8) == "grown"
    hold_resident(grower.pid, 16 * MIB)  # it has more already
    assert grow(grower, 1) == "refused"
    limit_data_of(grower.pid, 1 << 40)
    assert grow(grower, 64) == "grown"


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
def test_a_process_that_has_ended_is_an_error(grower: "subprocess.Popen[str]") -> None:
    grower.communicate("")
    for act in (hold_resident, limit_data_of):
        with pytest.raises(OSError):
            act(grower.pid, 1 << 30)
