"""Memory of the host's as a device's storage; on the CPU, and on the machines that have the
devices where these are tested.
"""

import pytest
import torch

from port_planner.torch_compat.devices import host_alias, set_allocator, storage_over


def test_a_storage_over_memory_is_that_memory() -> None:
    memory = torch.arange(8, dtype=torch.uint8)
    storage = storage_over(memory.data_ptr(), torch.device("cpu"), 8)
    assert torch.empty(0, dtype=torch.uint8).set_(storage).tolist() == list(range(8))


def test_the_allocator_takes_the_words_of_its_environment_variable() -> None:
    set_allocator("pinned_max_cached_size_mb:0")


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no MPS here")
def test_the_hosts_side_of_mps_is_its_memory() -> None:
    memory = torch.arange(8, dtype=torch.uint8, device="mps")
    torch.mps.synchronize()
    assert torch.empty(0, dtype=torch.uint8).set_(host_alias(memory.untyped_storage())).tolist() == list(range(8))
