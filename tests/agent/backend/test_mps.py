"""Apple's GPU: refused with the remedy where there is none; where there is, copies arrive."""

import pytest
import torch

from agent.backend.base import DeviceAbsentError
from agent.backend.mps import MpsBackend


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
