"""Code that libraries generate under RLIMIT_DATA, seen from mappings of Python's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.malloc import PreloadMode, preload_environment, preload_mode

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20

MAKING = """
import ctypes, mmap, sys
from port_agent.malloc import active
from port_planner.base.process_memory import data_bytes
libc, allocator = ctypes.CDLL(None), active()
READ, WRITE, RUN = 1, 2, 4
def address_of(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
def made(size=4 << 20):
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[0] = 7
    protect(memory, READ | WRITE | RUN)
    return memory
def protect(memory, how):
    assert libc.mprotect(ctypes.c_void_p(address_of(memory)), ctypes.c_size_t(len(memory)), how) == 0
def ways(memory):
    begin = address_of(memory)
    for line in open("/proc/self/maps"):
        first, last = (int(x, 16) for x in line.split()[0].split("-"))
        if first <= begin < last:
            return line.split()[1]
if not hasattr(libc, "port_malloc_close_code"):
    raise SystemExit("old")
"""
"""PROT_READ and so on of mmap(2): as Linux numbers them."""

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone"),
    pytest.mark.skipif(preload_mode() is not PreloadMode.PRELOAD, reason="the allocator cannot be preloaded here"),
    pytest.mark.process,
    pytest.mark.process,
    pytest.mark.process,
]


def ran(code: str) -> str:
    """Run code in a process with the allocator and return what it prints; skip where that was
    built before there was this.
    """
    environment = {**os.environ, **preload_environment(100 * MIB)}
    done = subprocess.run(
        [sys.executable, "-c", MAKING + code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.stderr == "old\n":
        pytest.skip("the allocator was built before: install again")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_code_that_is_closed_counts_no_longer_and_stays_as_it_is() -> None:
    said = ran(
        """
before, code = data_bytes(), made()
assert data_bytes() >= before + (4 << 20)
print(allocator.close_code() >> 20, ways(code), code[0])
assert data_bytes() <= before + (1 << 20)
print(allocator.close_code())
"""
    )
    assert said == "4 r-xp 7\n0\n"


def test_what_became_something_else_meanwhile_is_left_alone() -> None:
    said = ran(
        """
code = made()
protect(code, READ | WRITE)
print(allocator.close_code(), ways(code))
gone = made()
begin = address_of(gone)
libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(len(gone)))
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
assert libc.mmap(begin, len(gone), READ | WRITE, 0x32, -1, 0) == begin
print(allocator.close_code(), ways(gone))
"""
    )
    assert said == "0 rw-p\n0 rw-p\n"


def test_data_beside_code_stays_writable() -> None:
    said = ran(
        """
both = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
assert libc.mprotect(ctypes.c_void_p(address_of(both)), ctypes.c_size_t(4 << 20), READ | WRITE | RUN) == 0
allocator.close_code()
both[4 << 20] = 9
print(both[4 << 20])
"""
    )
    assert said == "9\n"
