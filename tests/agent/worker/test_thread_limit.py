"""A bundle may ask for more threads than there is room for: that is a refusal, not the end of the process."""

import subprocess
import sys

import pytest

from port_agent.worker.thread_limit import check_thread_limit, usable_cores

_LIMITED = """
import resource
from port_agent.worker.thread_limit import ThreadLimitError, check_thread_limit
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
check_thread_limit(60)
resource.setrlimit(resource.RLIMIT_DATA, (256 << 20, 256 << 20))
try:
    check_thread_limit(60)
except ThreadLimitError as error:
    print(error)
check_thread_limit(1)
check_thread_limit(3)
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts the stacks of threads on Linux alone")
def test_threads_beyond_the_limit_are_refused() -> None:
    run = subprocess.run([sys.executable, "-c", _LIMITED], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert run.stdout.startswith("the bundle's 60 threads on ") and "--threads" in run.stdout


def test_one_thread_for_each_core_has_room() -> None:
    check_thread_limit(usable_cores())
