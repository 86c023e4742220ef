"""Apple's GPU: refused with the remedy where there is none; where there is, copies arrive.

Its peak is what its allocator kept.
"""

import pytest
import torch

from port_agent.backend.base import DeviceAbsentError
from port_agent.backend.mps import HighWater, MpsBackend, fraction_of


class Allocator:
    """An allocator that keeps freed memory, as torch's on Apple's GPU: beside it, Metal holds `outside` bytes."""

    def __init__(self, outside: int) -> None:
        self.outside, self.held, self.kept = outside, 0, 0

    def take(self, nbytes: int) -> None:
        self.held, self.kept = self.held + nbytes, max(0, self.kept - nbytes)

    def free(self, nbytes: int) -> None:
        self.held, self.kept = self.held - nbytes, self.kept + nbytes

    def current_allocated_memory(self) -> int:
        return self.held

    def driver_allocated_memory(self) -> int:
        return self.outside + self.held + self.kept

    def empty_cache(self) -> None:
        self.kept = 0


def test_the_peak_is_that_of_all_tensors_whoever_made_them_and_however_long_ago_they_went() -> None:
    allocator = Allocator(outside=1000)
    allocator.take(50)
    high = HighWater(allocator)
    assert (high.peak_bytes(), high.outside_bytes()) == (50, 1000)
    allocator.take(300)
    allocator.free(300)
    assert high.peak_bytes() == 350
    assert high.outside_bytes() == 1000, "freed memory that is kept is no library's"
    assert high.peak_bytes() == 350
    allocator.outside += 70  # a library is loaded
    assert high.outside_bytes() == 1070 and high.peak_bytes() == 350
    high.reset()
    assert high.peak_bytes() == 50


@pytest.mark.parametrize(("nbytes", "fraction"), [(0, 1e-6), (1 << 30, 0.25), (1 << 40, 2.0)])
def test_a_limit_is_a_fraction_that_torch_takes_and_never_none_at_all(nbytes: int, fraction: float) -> None:
    assert fraction_of(nbytes, 4 << 30) == fraction


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an Apple GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(DeviceAbsentError, match="finds none; run it on such a Mac"):
        MpsBackend()


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")
def test_a_copy_out_and_in_arrives() -> None:
    backend = MpsBackend()
    there, host = backend.allocate(1 << 20), backend.allocate_host(1 << 20)[: 1 << 20]
    there.fill_(7)
    backend.copy(host, there, backend.reached())
    assert bool((host == 7).all())
