"""Blocks for what comes back from flash."""

import pytest
import torch

from port_agent.backend.raw_bytes import block
from port_planner.base.direct_io import BLOCK
from port_planner.base.process_memory import resident_bytes


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [(0, BLOCK), (1, BLOCK), (BLOCK, BLOCK), (BLOCK + 1, 2 * BLOCK), (16 * BLOCK - 1, 16 * BLOCK)],
)
def test_a_block_is_whole_blocks_and_never_none(nbytes: int, size: int) -> None:
    got = block(nbytes)
    assert (got.dtype, got.numel(), got.untyped_storage().nbytes()) == (torch.uint8, size, size)


def test_a_large_block_needs_no_bounce_and_is_given_back_at_once() -> None:
    before = resident_bytes()
    got = block(64 << 20)
    assert got.data_ptr() % BLOCK == 0
    got.fill_(1)
    assert resident_bytes() - before > 60 << 20
    del got
    assert resident_bytes() - before < 4 << 20
