"""The table of storages, and mappings of files."""

import ctypes
import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from port_agent import budget
from port_agent.backend import choose
from port_agent.intercept.residency import storages
from port_agent.intercept.residency.refusals import UnsupportedError
from port_agent.intercept.residency.storages import StorageTable
from tests.simulated_device import NAME, SimBackend

_MAP_FIXED = 0x10
"""Of Linux: what is at the address goes."""


def test_views_share_a_record_and_sizes_are_counted() -> None:
    table, x = StorageTable(1024), torch.ones(64, 64)
    record = table.of(x)
    assert record is not None and table.of(x[5:]) is record and table.known(x.t()) is record
    assert (table.resident_bytes, table.peak_bytes, len(table)) == (x.nbytes, x.nbytes, 1)
    assert table.numbered(record.number) is record and table.of_storage(x.untyped_storage()) is record


def test_what_is_read_past_the_dispatcher_is_left_alone() -> None:
    table = StorageTable(256)
    lengths, rows = torch.arange(100), torch.arange(100_000)
    assert table.of(lengths) is None
    assert table.of(rows[:10]) is not None, "asked by storage, not by view"
    assert table.of(torch.ones(999).share_memory_()) is None
    assert table.of(torch.from_numpy(torch.ones(999).numpy().copy())) is None


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are told by Linux alone")
def test_memory_at_the_address_of_a_mapping_that_is_gone_is_no_file(tmp_path: Path) -> None:
    """Memory of a buffer's that lies there would leave with the table, and what its owner writes meanwhile be lost."""
    table, nbytes = StorageTable(256), 1 << 20
    (tmp_path / "weights").write_bytes(bytes(nbytes))
    with (tmp_path / "weights").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)
    weights = torch.frombuffer(mapping, dtype=torch.float32)
    record, address = table.of(weights), weights.data_ptr()
    assert record is not None and record.mapped
    del weights, record
    gc.collect()
    anonymous = ctypes.CDLL(None, use_errno=True).mmap
    anonymous.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *4 * (ctypes.c_int,))
    anonymous.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    assert anonymous(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
    assert table.of(torch.frombuffer(mapping, dtype=torch.float32)) is None


def test_the_dead_are_buried_and_their_address_is_forgotten() -> None:
    table, x = StorageTable(256), torch.ones(999)
    record = table.of(x)
    del x
    gc.collect()
    assert list(table.reclaim_dead()) == [record]
    assert (table.resident_bytes, len(table)) == (0, 0)


def test_an_operator_may_resize() -> None:
    table, x = StorageTable(256), torch.ones(999)
    record = table.of(x)
    assert record is not None
    x.resize_(4000)
    table.resized(record)
    assert record.nbytes == table.resident_bytes == 16_000


def test_weights_of_a_file_are_mapped_and_come_back(tmp_path: Path) -> None:
    save_file({"w": torch.arange(1 << 16, dtype=torch.float32)}, tmp_path / "w.safetensors")
    weight = load_file(tmp_path / "w.safetensors")["w"]
    record = StorageTable(256).of(weight)
    assert record is not None and record.mapped and record.clean
    storages.drop_mapping(weight.untyped_storage())
    storages.populate_mapping(weight.untyped_storage())
    assert torch.equal(weight, torch.arange(1 << 16, dtype=torch.float32))


def test_pages_of_files_are_counted_apart(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1 << 16)}, tmp_path / "w.safetensors")
    weight, other = load_file(tmp_path / "w.safetensors")["weight"], torch.ones(1 << 10)
    table = StorageTable(256)
    mapped, made = table.of(weight), table.of(other)
    assert mapped is not None and made is not None
    assert (table.resident_bytes, table.mapped_bytes) == (other.nbytes, 0), "the weight is in its file"
    table.came(mapped)
    assert (table.resident_bytes, table.mapped_bytes) == (other.nbytes + mapped.nbytes, mapped.nbytes)
    table.went(mapped)
    assert (table.resident_bytes, table.mapped_bytes) == (other.nbytes, 0)


@pytest.mark.own_process
@pytest.mark.parametrize("unified", [False, True])
def test_a_device_is_left_alone_unless_it_takes_the_hosts_memory(
    unified: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimBackend()
    monkeypatch.setattr(choose, "backend_of", lambda kind: backend)
    backend.unified = unified
    with budget(tensors="64K", page_dir=tmp_path).resizing() as limit:
        host = torch.ones(64, 64)
        if unified:
            with pytest.raises(
                UnsupportedError, match=r"tensors on sim take the host's memory.*port-agent plan --device sim"
            ):
                host.to(NAME)
            return
        assert float((host.to(NAME) * 2).sum()) == 2 * 64 * 64
        assert limit.report.elsewhere == (NAME,)
