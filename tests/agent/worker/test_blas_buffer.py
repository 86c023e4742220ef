"""numpy's buffer for matrix products: given back, made anew where a product needs it, and the process ends in order."""

import subprocess
import sys

import pytest

from port_agent.system.python_process import module_environment

pytestmark = pytest.mark.process

_SCRIPT = """
import mmap
import numpy
from port_agent.worker.blas_buffer import release_blas_buffer
from port_planner.base.process_memory import data_bytes

rows = numpy.random.default_rng(0).random((300, 300))
wanted = rows @ rows
before = data_bytes()
freed = release_blas_buffer()
assert before - data_bytes() == freed, (before, data_bytes(), freed)
more = [mmap.mmap(-1, 8 << 20) for _ in range(8)]  # what would lie at its addresses otherwise
assert (rows @ rows == wanted).all()
assert release_blas_buffer() == freed, "once"
for taken in more:
    taken[:] = bytes(len(taken))
print(freed)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is counted so on Linux")
@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_buffer_is_given_back_and_made_anew(threads: str) -> None:
    environment = {**module_environment(), "OPENBLAS_NUM_THREADS": threads}
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    freed = int(ended.stdout)
    assert freed == 0 if threads == "2" else freed == 0 or freed > 30 << 20, (
        "a numpy with another library has none of it"
    )


def test_without_numpy_there_is_nothing_to_give_back() -> None:
    script = "from port_agent.worker.blas_buffer import release_blas_buffer; print(release_blas_buffer())"
    found = subprocess.run(
        [sys.executable, "-c", script], env=module_environment(), capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "0"
