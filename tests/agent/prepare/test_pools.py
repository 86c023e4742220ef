"""Budgets go with the memory that a device has; what copies between its memory and the host's take is measured."""

from dataclasses import replace

import pytest

from port_agent.backend.cpu import CpuBackend
from port_agent.backend.staging import BUFFERS
from port_agent.paging.pager import BURST
from port_agent.prepare.pools import PoolError, Pools, pools_of, with_host_headroom, with_own_memory
from port_planner.ir.costs import DeviceCosts, Flash
from tests.simulated_device import CONTEXT_BYTES, SimBackend

pytestmark = pytest.mark.own_process

MIB = 1 << 20
CARD = Flash("card", 1e8, 5e7, 1e-4, 1e-9, 1e-9)
DEVICE = DeviceCosts("test", 200 * MIB, 1.0, 1.0, CARD)


def test_a_budget_for_each_pool_and_no_more() -> None:
    assert pools_of(CpuBackend(), 100, None) == Pools(100)
    assert pools_of(SimBackend(), 100, 7) == Pools(100, 7, recording_bytes=7)
    assert pools_of(SimBackend(), 100, 7, 9) == Pools(100, 7, recording_bytes=9)
    assert (Pools(100).computing_bytes, Pools(100, 7).computing_bytes) == (100, 7)
    with pytest.raises(PoolError, match="on the CPU"):
        pools_of(CpuBackend(), 100, 7)
    with pytest.raises(PoolError, match="memory of its own; give the job's budget of it with --gpu-ram"):
        pools_of(SimBackend(), 100, None)


def test_the_hosts_memory_is_a_target_of_a_device_with_its_own() -> None:
    found = with_own_memory(DEVICE, SimBackend(), Pools(900 * MIB, 64 * MIB))
    assert found.base_bytes == CONTEXT_BYTES and found.flash == CARD
    assert found.host_base_bytes == 200 * MIB + BUFFERS * BURST
    host = found.host
    assert host is not None and host is found.targets[-1]
    assert host.capacity_bytes == 900 * MIB - found.host_base_bytes
    assert host.read_bytes_per_s > 1e8 and host.write_bytes_per_s > 1e8 and 0 < host.latency_s < 1.0
    assert found.budget_option == "--gpu-ram" and DEVICE.budget_option == "--ram"
    none = with_host_headroom(found, 100 * MIB).host
    assert none is not None and none.capacity_bytes == 0, "the process alone takes more than that"


def test_a_device_in_the_hosts_memory_takes_of_the_same_budget() -> None:
    shared = SimBackend()
    shared.unified = True
    assert with_own_memory(DEVICE, shared, Pools(900 * MIB)) == replace(DEVICE, base_bytes=200 * MIB + CONTEXT_BYTES)
