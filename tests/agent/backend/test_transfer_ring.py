"""What goes through the ring arrives whole, in either direction, whatever the buffers hold."""

import pytest
import torch

from port_agent.backend.transfer_ring import TransferRing
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 5000])
def test_bytes_go_to_the_device_and_come_back(nbytes: int) -> None:
    backend = SimBackend()
    backend.races()
    ring = TransferRing(backend, 512)
    here = torch.arange(nbytes, dtype=torch.int64).remainder(251).to(torch.uint8)
    there, back = torch.empty(nbytes, dtype=torch.uint8, device=NAME), torch.zeros(nbytes, dtype=torch.uint8)
    landed = ring.into_device(there, here).landed()
    backend.wait(landed)
    ring.out_of_device(back, there).synchronize()
    assert torch.equal(back, here) and backend.races() == []
    ring.close()


def test_what_goes_wrong_on_the_way_is_raised_where_the_copy_is_waited_for() -> None:
    ring = TransferRing(SimBackend(), 512)
    copy = ring.into_device(torch.empty(600, dtype=torch.uint8, device=NAME), torch.zeros(700, dtype=torch.uint8))
    with pytest.raises(RuntimeError):
        copy.synchronize()
    ring.close()
