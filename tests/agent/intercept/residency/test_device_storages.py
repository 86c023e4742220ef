"""The blocks of a device's storages, and the streams that they are in order with; moves run in `test_device_pool`."""

import math
import weakref
from pathlib import Path

import torch

from port_agent.intercept.residency.backing import ResizedStorages
from port_agent.intercept.residency.device_storages import HostBlocks, plain_operators
from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import StorageTable
from port_agent.paging.page_space import PageSpace
from port_agent.paging.pager import Pager


def _host(folder: Path, limit_bytes: float) -> Residency:
    return Residency(StorageTable(256), ResizedStorages(PageSpace(folder), Pager()), limit_bytes)


def test_a_block_stays_while_it_is_copied_and_is_paged_by_the_host_s_budget(tmp_path: Path) -> None:
    host = _host(tmp_path, 10_000)
    blocks = HostBlocks(host)
    first, second = blocks.take(8_000), None
    end = blocks.hold(first, write=True)
    torch.empty(0, dtype=torch.uint8).set_(first).fill_(7)
    end()
    second = blocks.take(8_000)
    blocks.hold(second, write=True)()
    host.try_make_free()
    assert host.table.resident_bytes == 8_000 and first.nbytes() == 0
    blocks.hold(first, write=False)
    assert first.nbytes() == 8_000 and first[0] == 7
    host.backing.close()


def test_blocks_are_used_again_where_nothing_bounds_the_host_alone(tmp_path: Path) -> None:
    for limit_bytes in (math.inf, 1 << 20):
        host = _host(tmp_path, limit_bytes)
        blocks = HostBlocks(host)
        block = blocks.take(4_096)
        blocks.give_back(block, 4_096)
        assert (blocks.take(4_096) is block) == math.isinf(limit_bytes)
        blocks.give_back(block, 4_096)
        gone = weakref.ref(block)
        del block
        blocks.take(4_095)  # of another size: no more is held than was in use at once
        assert gone() is None
        host.backing.close()


def test_operators_of_ours_make_tensors_that_any_mode_may_write() -> None:
    with torch.inference_mode():
        with plain_operators():
            made = torch.zeros(3)
        assert not made.is_inference()
