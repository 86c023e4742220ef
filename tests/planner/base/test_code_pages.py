"""Code that is not running leaves resident memory, and comes back when it runs again."""

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from port_planner.base import code_pages
from port_planner.base.code_pages import (
    code_mappings,
    data_mappings,
    forget_large_folios,
    large_code_files,
    release_code_pages,
    release_data_pages,
    release_shared_pages,
    shared_mappings,
    tells_own_pages,
)

SMAPS = """\
7f0000000000-7f0000100000 r-xp 00001000 fe:00 1234                       /usr/lib/with space/libtorch_cpu.so
Size:               1024 kB
Anonymous:             0 kB
Swap:                  0 kB
VmFlags: rd ex mr mw me
7f0000100000-7f0000200000 r-xp 00001000 fe:00 1235                       /usr/lib/librelocated.so
Anonymous:             8 kB
Swap:                  0 kB
7f0000200000-7f0000300000 r--p 00001000 fe:00 1234                       /usr/lib/with space/libtorch_cpu.so
Anonymous:             0 kB
Swap:                  0 kB
7f0000300000-7f0000400000 rw-p 00001000 fe:00 1234                       /usr/lib/with space/libtorch_cpu.so
Anonymous:             0 kB
7f0000400000-7f0000500000 r-xp 00000000 00:00 0
Anonymous:             0 kB
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
7f0000500000-7f0000600000 r--p 00000000 fe:00 99                         /home/weights.safetensors
Anonymous:             0 kB
7f0000600000-7f0000700000 r-xp 00000000 fe:00 99                         /usr/bin/python3.11
Anonymous:             0 kB
7f0000700000-7f0000800000 r--p 00000000 fe:00 99                         /usr/bin/python3.11
Anonymous:             0 kB
Swap:                  4 kB
"""

MAPS = """\
7f0000000000-7f0000100000 r--s 00000000 fe:00 12                         /home/with space/rows.bin
7f0000100000-7f0000200000 rw-s 00000000 fe:00 13                         /home/gone.arrow (deleted)
7f0000200000-7f0000300000 rw-s 00000000 00:18 14                         /dev/shm/torch_1
7f0000300000-7f0000400000 rw-s 00000000 00:01 15                         /memfd:torch (deleted)
7f0000400000-7f0000500000 r--p 00000000 fe:00 99                         /home/weights.safetensors
7f0000500000-7f0000600000 rw-s 00000000 00:00 0
"""

WRITES_SHARED = """
import mmap, sys
from port_planner.base.code_pages import release_shared_pages
from port_planner.base.process_memory import resident_bytes

with open(sys.argv[1], "w+b") as file:
    file.truncate(64 << 20)
    shared = mmap.mmap(file.fileno(), 0)
shared[:] = b"x" * len(shared)
held = resident_bytes()
release_shared_pages(lambda path: True)
assert held - resident_bytes() < 1 << 20
release_shared_pages(lambda path: False)
print(held - resident_bytes(), shared[:] == b"x" * len(shared))
"""

PROGRAM = """
import torch
from port_planner.base.code_pages import release_code_pages
from port_planner.base.process_memory import resident_bytes

weight = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
before = torch.linalg.matrix_exp(weight)
held = resident_bytes()
release_code_pages()
print(held - resident_bytes())
assert torch.equal(torch.linalg.matrix_exp(weight), before)
"""


def test_only_clean_code_and_constants_of_executable_files_are_released() -> None:
    assert code_mappings(SMAPS) == [
        (0x7F0000000000, 0x7F0000100000),
        (0x7F0000200000, 0x7F0000300000),
        (0x7F0000600000, 0x7F0000700000),
    ]
    assert data_mappings(SMAPS) == [(0x7F0000500000, 0x7F0000600000)]


PROOF = """\
7f0000800000-7f0000801000 rw-p 00000000 fe:00 99                         /usr/bin/python3.11
Rss:                   {resident} kB
Anonymous:             {own} kB
Swap:                  {swapped} kB
7f0000900000-7f0000a00000 rw-p 00000000 00:00 0
Rss:                   {resident} kB
Anonymous:          {others} kB
Swap:                  0 kB
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
Anonymous:          {others} kB
"""


@pytest.mark.parametrize(
    ("own", "swapped", "others", "told"),
    [(4, 0, 8, True), (0, 4, 8, True), (0, 0, 0, False), (0, 0, 1024, False)],
    ids=["resident", "swapped out", "qemu-user 7", "qemu-user 10"],
)
def test_figures_that_deny_this_processs_own_pages_are_not_believed(
    own: int, swapped: int, others: int, told: bool
) -> None:
    """qemu-user 7 says of every mapping that nothing of it is anonymous, qemu-user 10 says so of every file's."""
    smaps = SMAPS + PROOF.format(own=own, swapped=swapped, others=others, resident=own)
    assert tells_own_pages(smaps, 0x7F0000800000) is told
    assert not tells_own_pages(smaps, 0x7F0000000010), "an address in a file's clean mapping"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="smaps is Linux's")
def test_nothing_is_given_back_where_they_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(code_pages, "_give_back", lambda start, stop: given.append((start, stop)))
    release_code_pages()
    if not given:
        pytest.skip("an emulator of user programs, whose figures are not believed")
    given.clear()
    emulated = without_pages_of_files(Path("/proc/self/smaps").read_text())
    monkeypatch.setattr(Path, "read_text", lambda path: emulated)
    release_code_pages()
    release_data_pages()
    assert not given


def without_pages_of_files(smaps: str) -> str:
    """Return a smaps as qemu-user 10 writes it: no file's mapping has pages of its own, all others have."""
    lines, of_file = list[str](), False
    for line in smaps.splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            of_file = words[-1].startswith("/")
        lines.append("Anonymous: 0 kB" if of_file and words[0] in ("Anonymous:", "Swap:") else line)
    return "\n".join(lines)


def test_large_files_of_code_are_those_with_four_mebibytes_of_it() -> None:
    assert large_code_files(SMAPS) == set()
    assert large_code_files(SMAPS.replace("7f0000000000-7f0000100000", "7effffc00000-7f0000000000")) == {
        "/usr/lib/with space/libtorch_cpu.so"
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_in_large_folios_leaves_the_page_cache_with_nothing_lost(tmp_path: Path) -> None:
    path, text = tmp_path / "library.so", b"code" * (2 << 20)
    with path.open("w+b") as file:
        file.write(text)
        os.fsync(file.fileno())
        assert os.preadv(file.fileno(), [bytearray(4)], 0, os.RWF_NOWAIT) == 4
        if not forget_large_folios(str(path)):
            pytest.skip("this kernel maps no folio as a whole, or this file system has none that are large")
        with pytest.raises(BlockingIOError):
            os.preadv(file.fileno(), [bytearray(4)], 0, os.RWF_NOWAIT)
    assert path.read_bytes() == text


def test_shared_mappings_are_those_of_files_with_names() -> None:
    assert shared_mappings(MAPS) == [
        (0x7F0000000000, 0x7F0000100000, "/home/with space/rows.bin"),
        (0x7F0000100000, 0x7F0000200000, "/home/gone.arrow"),
    ]


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_written_to_a_shared_file_is_there_after_its_pages_left(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WRITES_SHARED, str(tmp_path / "rows.bin")], capture_output=True, text=True, check=True
    )
    left, same = ran.stdout.split()
    assert int(left) > 60 << 20 and same == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_took_the_place_of_a_file_since_it_was_listed_keeps_its_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection of garbage unmapped a file of weights there, and objects of Python's were allocated in its place."""
    taken = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    taken[:5] = b"taken"
    start = ctypes.addressof(ctypes.c_char.from_buffer(taken))
    listed = start, start + mmap.PAGESIZE
    for name, release in (("data_mappings", release_data_pages), ("code_mappings", release_code_pages)):
        monkeypatch.setattr(code_pages, name, lambda _: [listed])
        release()
    monkeypatch.setattr(code_pages, "shared_mappings", lambda _: [(*listed, "/home/rows.bin")])
    release_shared_pages(lambda _: False)
    assert taken[:5] == b"taken"


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_loaded_torch_shrinks_and_goes_on_with_the_same_numbers() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(ran.stdout) > 20 << 20, "bytes that left resident memory"
