"""The residency over either way to keep what is away: what it believes decides over guarded
memory's time, never its bytes.
"""

from pathlib import Path

import pytest
import torch

from port_agent.intercept.residency.backing import ResizedStorages
from port_agent.intercept.residency.storages import GuardedPage, StorageTable
from port_agent.malloc import PreloadMode, preload_mode
from port_agent.paging.page_space import PageSpace
from port_agent.paging.pager import Pager
from tests.agent.intercept.programs import followed, written

OVER_GUARDED_MEMORY = """
import ctypes
from functools import partial
from pathlib import Path
import torch
from port_agent.guard import active_guard
from port_agent.intercept.residency.backing import GuardedStorages
from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import StorageTable

BYTES = 1 << 20
guard = active_guard()
backing = GuardedStorages(guard, Path())
residency = Residency(StorageTable(64 << 10, guard), backing, 2 * BYTES)
tensors = [torch.full((BYTES // 4,), float(k)) for k in range(4)]
addresses = [t.data_ptr() for t in tensors]
held_by_numpy = tensors[0].numpy()
records = [residency.table.of(t) for t in tensors]
for clock, record in enumerate(records):
    residency.eviction.touch(record, clock, None)
held_bytes = guard.held_bytes()
residency.make_free(0)
print("they leave:", [r.resident for r in records], guard.held_bytes() - held_bytes == -2 * BYTES)
print("they are found:", held_by_numpy[7], tensors[1][7].item(), records[0].resident, [t.data_ptr() for t in tensors] == addresses)
residency.ensure_resident(records[:1])
ctypes.c_float.from_address(addresses[0]).value = 9.0
residency.limit_bytes = 0
residency.make_free(0)
print("a write nobody told of:", records[0].clean, tensors[0][0].item())
born = residency.bear_away(partial(torch.empty, BYTES, dtype=torch.uint8))
source = torch.arange(BYTES) % 251
backing.wait(backing.write_part(residency.table.of(born), born.untyped_storage(), source.to(torch.uint8), 0, BYTES))
print("born away:", residency.table.of(born).resident, torch.equal(born, source.to(torch.uint8)))
import os
from safetensors.torch import load_file, save_file
save_file({"a": torch.ones(7), "w": torch.ones(512, 512)}, "w.safetensors")
weight = load_file("w.safetensors")["w"].untyped_storage()
record = residency.table.of_storage(weight)
seals = [backing.seal(record, weight)]
for byte in (0, weight.nbytes() // 2):
    ctypes.c_ubyte.from_address(weight.data_ptr() + byte).value = 7
    seals.append(backing.seal(record, weight))
print("of a mapping:", record.block_offset > 0, [backing.unwritten(record, weight, seal) for seal in seals])
backing.close()
print("in all:", backing.totals().written_bytes >= 5 * BYTES, backing.totals().stall_seconds > 0)
"""


@pytest.mark.process
@pytest.mark.skipif(preload_mode() is not PreloadMode.PRELOAD, reason="the library cannot be preloaded")
def test_over_guarded_memory_whoever_comes_finds_what_was_there(tmp_path: Path) -> None:
    written(tmp_path, OVER_GUARDED_MEMORY)
    done = followed("train.py", folder=tmp_path, bound=("--tensors", "64M", "--guard-only"), timeout_s=100)
    assert (done.code, done.output.splitlines()) == (
        0,
        [
            "they leave: [False, False, True, True] True",
            "they are found: 0.0 1.0 False True",
            "a write nobody told of: True 9.0",
            "born away: False True",
            "of a mapping: True [False, False, True]",
            "in all: True True",
        ],
    ), done.said


def test_a_storage_without_a_page_of_ours_is_no_storage_to_read(tmp_path: Path) -> None:
    space, pager = PageSpace(tmp_path), Pager()
    backing, tensor = ResizedStorages(space, pager), torch.zeros(1 << 16)
    storage = StorageTable(256).of(tensor)
    assert storage is not None
    for page in (None, GuardedPage(0)):
        storage.page = page
        with pytest.raises(RuntimeError, match="has no page"):
            backing.read(storage, tensor.untyped_storage())
    backing.close()
