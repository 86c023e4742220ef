"""Which way an operator runs, and what of its operands that takes resident."""

from pathlib import Path

import torch

from port_agent import budget
from port_agent.intercept.budget import Budget
from port_agent.intercept.dispatch.tiling_choice import TilingChoice
from port_agent.intercept.dispatch.traits import traits_of
from port_agent.intercept.tiles.elementwise import TILE_BYTES

aten = torch.ops.aten
TILE = TILE_BYTES // 4
"""Numbers in a tile of an operand."""


def ways_of(bound: Budget) -> TilingChoice:
    interceptor = bound.interceptor
    return TilingChoice(interceptor.table, interceptor.residency, interceptor.op_memory)


def test_what_takes_more_than_the_limit_is_in_tiles_and_needs_only_what_must_be_written(tmp_path: Path) -> None:
    with budget(tensors=4 * TILE_BYTES, page_dir=tmp_path).resizing() as b:
        tiling, add = ways_of(b), traits_of(aten.add.Tensor)
        for tiles_each in (1, 2):
            x, y = torch.ones(tiles_each * TILE), torch.ones(tiles_each * TILE)
            tiles, from_file = tiling.tiled_call(add, add.func, (x, y), {}, x.nbytes + y.nbytes)
            assert (tiles is not None) == (tiles_each == 2) and from_file is None
        away, here = (b.interceptor.table.of(tensor) for tensor in (x, y))
        assert away is not None and here is not None
        b.interceptor.residency.empty()
        b.interceptor.residency.ensure_resident([here])
        held, mapped = tiling.ensure_resident(add, [away, here], None, whole=False)
        assert held == [here] and not away.resident and mapped is None
        held, _ = tiling.ensure_resident(add, [away, here], None, whole=True)
        assert held == [away, here] and away.resident


def test_what_has_no_tiles_runs_whole_whatever_it_takes(tmp_path: Path) -> None:
    with budget(tensors=TILE_BYTES, page_dir=tmp_path).resizing() as b:
        x = torch.ones(2 * TILE)
        cumsum = traits_of(aten.cumsum.default)
        assert ways_of(b).tiled_call(cumsum, cumsum.func, (x, 0), {}, x.nbytes) == (None, None)
