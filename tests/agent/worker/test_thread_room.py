"""A bundle may ask for more threads than there is room for: that is a refusal, not the end of the process."""

import subprocess
import sys

import pytest

from agent.worker.thread_room import check_thread_room, usable_cores

_LIMITED = """
import resource, threading
from agent.worker.thread_room import check_thread_room
from planner.ir.errors import PortError
threading.stack_size(1 << 20)
check_thread_room(60)
limit = 256 << 20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    check_thread_room(60)
except PortError as error:
    print(error)
assert threading.stack_size() == 1 << 20 and threading.active_count() == 1
check_thread_room(3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts the stacks of threads on Linux alone")
def test_threads_beyond_the_limit_are_refused_and_none_is_left() -> None:
    run = subprocess.run([sys.executable, "-c", _LIMITED], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert run.stdout.startswith("there is no room for the bundle's 60 threads on ") and "--threads" in run.stdout


def test_one_thread_for_each_core_has_room() -> None:
    check_thread_room(usable_cores())
