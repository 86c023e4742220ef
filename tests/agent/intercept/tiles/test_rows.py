"""Rows of a mapped table: those of the whole call, whatever order they are asked in, and the table stays away."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from port_agent import budget
from port_agent.intercept.residency.storages import StorageTable
from port_agent.intercept.tiles import rows
from port_agent.intercept.tiles.rows import mapped_copy, mapped_rows

ATEN = torch.ops.aten
ROWS, WIDTH = 1000, 64


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """A table of many stretches, in a file."""
    monkeypatch.setattr(rows, "TILE_BYTES", 16 << 10)
    monkeypatch.setattr(rows, "AROUND_BYTES", 16 << 10)
    save_file(
        {"table": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))}, tmp_path / "t.safetensors"
    )
    return load_file(tmp_path / "t.safetensors")["table"]


def known(table: torch.Tensor) -> StorageTable:
    storages = StorageTable(256)
    storages.of(table)
    return storages


@pytest.mark.parametrize("indices", [[[5, 999, 5], [0, 64, 63]], [7], [[]], 3], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_an_embedding_has_the_rows_of_the_whole(table: torch.Tensor, indices: object, dtype: torch.dtype) -> None:
    asked = torch.tensor(indices, dtype=dtype)
    call = mapped_rows(ATEN.embedding.default, (table, asked, 5), {}, known(table))
    assert call is not None
    assert torch.equal(call.run(), ATEN.embedding.default(table, asked, 5))


@pytest.mark.parametrize("indices", [[999, 0, 64, 0], 3], ids=str)
def test_a_selection_of_rows_has_those_of_the_whole(table: torch.Tensor, indices: object) -> None:
    asked = torch.tensor(indices)
    call = mapped_rows(ATEN.index_select.default, (table, 0, asked), {}, known(table))
    assert call is not None
    assert torch.equal(call.run(), table.index_select(0, asked))
    assert mapped_rows(ATEN.index_select.default, (table, 1, asked), {}, known(table)) is None


@pytest.mark.parametrize("index", [ROWS, -1])
def test_a_row_that_is_not_there_raises_what_torch_raises(table: torch.Tensor, index: int) -> None:
    asked = torch.tensor([0, index, 5])
    with pytest.raises(IndexError) as expected:
        ATEN.embedding.default(table, asked)
    call = mapped_rows(ATEN.embedding.default, (table, asked), {}, known(table))
    assert call is not None
    with pytest.raises(IndexError) as found:
        call.run()
    assert str(found.value) == str(expected.value)


def test_small_tables_and_those_in_ram_are_read_whole(table: torch.Tensor) -> None:
    asked, copy = torch.tensor([1, 2]), table.clone()
    assert mapped_rows(ATEN.embedding.default, (copy, asked), {}, known(copy)) is None
    assert mapped_rows(ATEN.embedding.default, (table, asked), {}, StorageTable(256)) is None
    assert mapped_rows(ATEN.mul.Tensor, (table, table), {}, known(table)) is None


def test_a_followed_lookup_brings_no_table(table: torch.Tensor, tmp_path: Path) -> None:
    asked = torch.randint(0, ROWS, (3, 50), generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.embedding(asked, table)
    with budget(tensors="64K", page_dir=tmp_path).resizing() as b:
        found = torch.nn.functional.embedding(asked, table)
        assert b.report.mapped_bytes == 0
    assert torch.equal(found, expected)


COPIES = [lambda part: part.double(), lambda part: part.to("cpu", torch.bfloat16), torch.clone]


@pytest.mark.parametrize("rows_at_once", [20, 400, ROWS])
@pytest.mark.parametrize("copy", COPIES, ids=["converted", "halved", "cloned"])
def test_a_followed_copy_brings_a_stretch_of_the_table_at_a_time(
    copy: Callable[[torch.Tensor], torch.Tensor], rows_at_once: int, table: torch.Tensor, tmp_path: Path
) -> None:
    """An embedding of 260 MiB stood beside its copy of 519 in 32 bits, in a budget of 1 GiB."""
    firsts = range(0, ROWS, rows_at_once)
    expected = [copy(table[first : first + rows_at_once]) for first in firsts]
    made_bytes = max(part.nbytes for part in expected)
    with budget(tensors=made_bytes + (48 << 10), page_dir=tmp_path).resizing() as b:
        found = [copy(table[first : first + rows_at_once]) for first in firsts]
        assert b.report.mapped_bytes == table.nbytes and b.report.over_bytes == 0
    assert all(torch.equal(copied, part) for copied, part in zip(found, expected, strict=True))


def test_copies_of_other_kinds_run_whole(table: torch.Tensor) -> None:
    convert, to = ATEN._to_copy.default, {"dtype": torch.float64}
    part = mapped_copy(convert, (table[:300],), to, known(table))
    assert part is not None and part.need_bytes == 300 * WIDTH * 8 + (16 << 10) + (16 << 10)
    for asked in ({"dtype": torch.int32}, {"memory_format": torch.channels_last}, {"device": torch.device("meta")}):
        assert mapped_copy(convert, (table,), asked, known(table)) is None
    assert mapped_copy(convert, (table.t(),), to, known(table)) is None
    assert mapped_copy(convert, (table.clone()[:300],), to, known(table)) is None
    assert mapped_copy(ATEN.neg.default, (table[:300],), {}, known(table)) is None
