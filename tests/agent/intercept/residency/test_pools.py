"""Storages of two pools go to the residency of their own, and time is one."""

from pathlib import Path

import torch

from port_agent.intercept.residency.backing import ResizedStorages
from port_agent.intercept.residency.pools import MemoryPools
from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import Storage, StorageTable
from port_agent.paging.page_space import PageSpace
from port_agent.paging.pager import Pager


def _residency(table: StorageTable, folder: Path) -> Residency:
    return Residency(table, ResizedStorages(PageSpace(folder), Pager()), 1 << 20)


def test_each_storage_goes_to_its_own_pool(tmp_path: Path) -> None:
    table = StorageTable(256)
    pools = MemoryPools(_residency(table, tmp_path))
    there = _residency(table.add_device(torch.device("meta", 0), 256), tmp_path)
    pools.add(there)
    x, y = torch.ones(1000), torch.ones(1000)
    here, away = table.of(x), there.table.of(y)
    assert here is not None and away is not None and table.known(y) is away
    assert pools.of(here) is pools.host and pools.of(away) is there and list(pools) == [there, pools.host]
    assert (len(table), len(there.table), table.met) == (1, 1, 2)
    storages: list[Storage] = [here, away]
    for storage in storages:
        storage.pins += 1
        storage.clean = True
    pools.begin_operator(expected=False)
    pools.change(storages)
    assert not here.clean and not away.clean and pools.host.clock == there.clock == 1
    for storage in storages:
        storage.pins -= 1
    pools.ensure_resident(storages)
    there.empty()
    assert here.resident and not away.resident and pools.pressed
    assert (table.resident_bytes, there.table.resident_bytes) == (4000, 0)
    pools.ensure_resident(storages)
    assert torch.equal(y, x)
    for residency in pools:
        residency.backing.close()
