"""Reserved address space under RLIMIT_DATA, seen from Python's own mmap."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.malloc import PreloadMode, preload_environment, preload_mode

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20

RESERVING = """
import mmap, resource, signal, sys
from port_agent.malloc import active
from port_agent.system.memory_limit import limit_data
from tests.waiting import until
allocator = active()
if not allocator.allow_reservations():
    raise SystemExit("old")
limit_data(200 << 20)
limit = lambda: resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20
def reserve(size, no_reserve=0x4000):
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
def touch(memory, size):
    for place in range(0, size, mmap.PAGESIZE):
        memory[place] = 1
"""
"""0x4000 is MAP_NORESERVE of Linux, which Python names from 3.13 on."""

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone"),
    pytest.mark.skipif(preload_mode() is not PreloadMode.PRELOAD, reason="the allocator cannot be preloaded here"),
    pytest.mark.process,
    pytest.mark.process,
    pytest.mark.process,
]


def ran(code: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a process with the allocator; skip where that was built before there were reservations."""
    environment = {**os.environ, **preload_environment(100 * MIB)}
    command = [sys.executable, "-c", RESERVING + code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.stderr == "old\n":
        pytest.skip("the allocator was built before: install again")
    return done


def test_what_is_reserved_and_not_touched_does_not_count() -> None:
    done = ran(
        """
held = reserve(1 << 30)
assert 1024 + 200 - 4 <= limit() <= 1024 + 200
touch(held, 64 << 20)
until(lambda: 1024 + 200 - 70 <= limit() <= 1024 + 200 - 64)
held.close()
until(lambda: limit() == 200)
again = reserve(1 << 30)
allocator.widen_data_limit(8 << 20)
again.close()
until(lambda: limit() == 208)
print("done")
"""
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_the_belt_holds_for_all_that_is_not_reserved() -> None:
    done = ran(
        """
held = reserve(1 << 30)
for refused in (lambda: bytearray(400 << 20), lambda: reserve(400 << 20, 0)):
    try:
        refused()
    except (MemoryError, OSError):
        print("refused")
"""
    )
    assert (done.returncode, done.stdout) == (0, "refused\n" * 2), done.stderr


def test_who_touches_more_than_the_limit_is_killed() -> None:
    done = ran("held = reserve(1 << 30)\ntouch(held, 1 << 30)\nsignal.pause()")
    assert done.returncode == -signal.SIGKILL
    assert "touched more memory than its limit allows" in done.stderr


def test_a_forked_child_reserves_by_itself() -> None:
    done = ran(
        """
import os
held = reserve(1 << 30)
child = os.fork()
if child == 0:
    own = reserve(1 << 30)
    touch(own, 32 << 20)
    own.close()
    until(lambda: limit() <= 1024 + 200)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert done.stdout == "0\n", done.stderr
