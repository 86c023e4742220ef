"""On the CPU everything is done at once, in the process's own memory."""

import torch

from port_agent.backend.cpu import DONE, CpuBackend


def test_a_copy_is_there_when_it_is_asked_for() -> None:
    backend = CpuBackend()
    source, target = torch.arange(8, dtype=torch.uint8), backend.allocate(8)[:8]
    event = backend.copy(target, source, backend.reached())
    assert torch.equal(target, source)
    event.synchronize()
    backend.wait(DONE)
    backend.synchronize()


def test_its_memory_can_be_paged_by_address_and_is_counted_by_the_kernel() -> None:
    backend = CpuBackend()
    assert backend.addressable and backend.allocate(10).is_cpu and backend.allocate_host(10).is_cpu
    backend.limit(1)
    backend.reset_peak()
    assert backend.allocated_bytes() == backend.peak_bytes() == 0


def test_its_generator_is_torchs() -> None:
    backend = CpuBackend()
    state = backend.generator_state()
    first = torch.rand(2)
    backend.set_generator_state(state)
    assert torch.equal(first, torch.rand(2))
