"""Tiles have the bits of the whole, each where it lies, or they are no tiles of it."""

import torch

from port_planner.exactness.tiles import Operands, tiles_equal


def test_each_tile_is_compared_where_it_lies() -> None:
    whole = Operands(torch.float32).numbers(6, 4)
    tiles = [(0, 2, whole[:2].clone()), (2, 6, whole[2:].clone())]
    assert tiles_equal(whole, tiles)
    assert tiles_equal(whole.t(), [(a, b, tile.t()) for a, b, tile in tiles], dim=1)
    assert not tiles_equal(whole, [(a, b, tile.nextafter(torch.tensor(9.0))) for a, b, tile in tiles])
    assert not tiles_equal(whole, [(0, 3, whole[:2])]), "a tile of another size"


def test_operands_are_the_same_each_time_and_laid_out_as_wanted() -> None:
    layout = torch.empty_strided((3, 4), (1, 5), device="meta", dtype=torch.bfloat16)
    one, other = (Operands(torch.bfloat16).like(layout) for _ in range(2))
    assert torch.equal(one, other) and (one.stride(), one.dtype) == (layout.stride(), layout.dtype)
    assert Operands(torch.float32, seed=1, spread=0.01).numbers(1000).std() < 0.1
