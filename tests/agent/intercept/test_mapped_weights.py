"""Weights that are mapped from a file: what the program does to them, before and past the dispatcher, is never lost."""

import ctypes
from pathlib import Path

import pytest
import torch

from port_agent import budget
from port_agent.intercept.residency.storages import mapping_written

ROWS, COLUMNS = 512, 256  # 512 KiB, some whole pages


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save({"table": torch.randn(ROWS, COLUMNS)}, tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def mapped(weights: Path) -> torch.Tensor:
    table: torch.Tensor = torch.load(weights, mmap=True)["table"]
    return table


def press() -> None:
    """Run something that needs all the room there is."""
    torch.ones(ROWS, COLUMNS).mul(2)


def test_pages_of_weights_that_were_copied_at_the_beginning_are_given_back(weights: Path, tmp_path: Path) -> None:
    """A model that is loaded in another type is read from its file once: its pages stood beside
    the copies until the end.
    """
    with budget(tensors="1G", page_dir=tmp_path).resizing() as held:
        table = mapped(weights)
        expected = table.sum()
        assert table.double().sum().float().allclose(expected)
        storage = held.interceptor.table.known(table)
        assert storage is not None and not storage.resident
        assert torch.equal(table.sum(), expected)


def test_a_write_before_the_budget_began_is_kept(weights: Path, tmp_path: Path) -> None:
    table, expected = mapped(weights), mapped(weights).clone() * 3
    table.mul_(3)
    assert mapping_written(table.untyped_storage())
    with budget(tensors="4K", page_dir=tmp_path).resizing():
        table.sum()
        press()
        assert torch.equal(table + 0, expected)
    assert torch.equal(table, expected)


@pytest.mark.parametrize("write", ["numpy", "address"])
def test_a_write_through_a_pointer_is_kept(weights: Path, tmp_path: Path, write: str) -> None:
    table, expected = mapped(weights), mapped(weights).clone()
    expected[100] = 7
    with budget(tensors="4K", page_dir=tmp_path).resizing():
        table.sum()
        press()
        if write == "numpy":
            rows = table.numpy()
            rows[100] = 0
            press()
            table + 0
            rows[100] = 7  # the same pointer, again
        else:
            sevens = (ctypes.c_float * COLUMNS)(*[7.0] * COLUMNS)
            ctypes.memmove(table.data_ptr() + 100 * COLUMNS * 4, sevens, COLUMNS * 4)
        press()
        assert torch.equal(table + 0, expected)
        press()
        assert torch.equal(table + 0, expected)
    assert torch.equal(table, expected)


def test_what_was_computed_from_it_before_such_a_write_is_not_computed_again(weights: Path, tmp_path: Path) -> None:
    def program(table: torch.Tensor) -> list[torch.Tensor]:
        sums = []
        for k in range(4):
            half = table.to(torch.float16).mul(2)
            if k == 3:
                table.numpy()[:] = 1
            press()
            sums.append(half.float().sum())
        return sums

    expected = program(mapped(weights))
    with budget(tensors="600K", page_dir=tmp_path).resizing():
        followed = program(mapped(weights))
    assert torch.equal(torch.stack(followed), torch.stack(expected))


def test_pointers_that_write_nothing_make_no_pages(weights: Path, tmp_path: Path) -> None:
    table = mapped(weights)
    x = torch.ones(4, COLUMNS)
    with budget(tensors="4K", page_dir=tmp_path).resizing() as b:
        table.data_ptr()
        for _ in range(3):
            x @ table.t()
        assert not mapping_written(table.untyped_storage())
    assert b.report.written_bytes < table.nbytes // 2


def test_views_and_rows_bring_nothing_in(weights: Path, tmp_path: Path) -> None:
    table = mapped(weights)
    rows = torch.tensor([3, 400])
    with budget(tensors="4K", page_dir=tmp_path).resizing() as b:
        looked_up = torch.nn.functional.embedding(rows, table.detach().view(ROWS, COLUMNS))
        first = table[0, 0].item()
    assert b.report.mapped_bytes == 0
    assert torch.equal(looked_up, table[rows]) and first == table[0, 0].item()
