"""Tiles that begin and end anywhere are what was written, chunk by chunk."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from port_agent import budget
from port_agent.intercept.budget import Budget
from port_agent.intercept.residency.storages import Storage
from port_agent.intercept.tiles.tile_buffers import TileBuffers
from port_agent.paging.pager import CHUNK, PageError

ELEMENTS = 3 * CHUNK // 4 + 1001


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Budget]:
    with budget(tensors="64M", page_dir=tmp_path).resizing() as one:
        yield one


def born_away(held: Budget) -> tuple[torch.Tensor, Storage]:
    """Return a tensor in the page file, holding nothing yet, and its storage."""
    tensor = held.interceptor.residency.bear_away(partial(torch.empty, ELEMENTS))
    storage = held.interceptor.table.of(tensor)
    assert storage is not None
    return tensor, storage


@pytest.mark.slow
@pytest.mark.parametrize("step", [CHUNK // 4, 1000, 100_003, ELEMENTS])
@pytest.mark.parametrize("other", [CHUNK // 2, 70_001])
def test_tiles_of_one_size_are_read_back_in_another(held: Budget, step: int, other: int) -> None:
    with torch.utils._python_dispatch._disable_current_modes():
        expected, (tensor, storage) = torch.randn(ELEMENTS), born_away(held)
        buffers = TileBuffers(held.interceptor.residency, {storage.key: storage})
        for start in range(0, ELEMENTS, step):
            buffers.append(storage, expected[start : start + step], start)
        buffers.finish()
        for start in range(0, ELEMENTS, other):
            stop = min(start + other, ELEMENTS)
            assert torch.equal(buffers.load(tensor, start, stop), expected[start:stop])
        storage.clean = True


def test_a_tile_of_what_is_resident_is_a_view(held: Budget) -> None:
    tensor = torch.randn(100, 100)
    tile = TileBuffers(held.interceptor.residency, {}).load(tensor, 150, 250)
    assert torch.equal(tile, tensor.view(-1)[150:250]) and tile.data_ptr() == tensor.data_ptr() + 4 * 150


def test_what_was_read_ahead_of_a_tile_is_not_read_again(held: Budget) -> None:
    with torch.utils._python_dispatch._disable_current_modes():
        expected, (tensor, storage) = torch.randn(ELEMENTS), born_away(held)
        buffers, stats = (
            TileBuffers(held.interceptor.residency, {storage.key: storage}),
            held.interceptor.residency.backing.stats,
        )
        buffers.append(storage, expected, 0)
        buffers.finish()
        before = stats.read_bytes
        for start in range(0, ELEMENTS, 100_003):
            buffers.load(tensor, start, min(start + 100_003, ELEMENTS))
        assert stats.read_bytes - before == 4 * ELEMENTS
        storage.clean = True


def test_a_write_that_fails_is_told_at_the_latest_at_the_end(held: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise PageError("the medium is full", 28)

    with torch.utils._python_dispatch._disable_current_modes():
        _tensor, storage = born_away(held)
        buffers = TileBuffers(held.interceptor.residency, {})
        monkeypatch.setattr(held.interceptor.residency.backing, "wait", fails)
        buffers.append(storage, torch.zeros(ELEMENTS), 0)
        with pytest.raises(PageError, match="full"):
            buffers.finish()
        storage.clean = True
