"""CUDA: refused with the remedy where there is none; where there is, copies follow events."""

import pytest
import torch

from agent.backend.base import DeviceAbsentError
from agent.backend.cuda import CudaBackend

absent = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
present = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@absent
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(DeviceAbsentError, match="finds none; run it where there is one"):
        CudaBackend()


@present
def test_a_copy_out_and_in_follows_what_was_computed() -> None:
    backend = CudaBackend()
    there, host = backend.allocate(1 << 20), backend.allocate_host(1 << 20)
    there.fill_(7)
    backend.copy(host, there, backend.reached()).synchronize()
    assert bool((host == 7).all())
    host.fill_(9)
    backend.wait(backend.copy(there, host, backend.reached()))
    assert int(there.sum(dtype=torch.int64)) == 9 << 20
