"""Blocks for what comes back from flash, and views of a storage under other dtypes."""

import pytest
import torch

from port_agent.backend.raw_bytes import block, view
from port_planner.base.direct_io import BLOCK
from port_planner.base.process_memory import resident_bytes
from port_planner.ir.graph import Value


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


def raw_bytes(tensor: torch.Tensor) -> object:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int64", "bool", "uint8"])
def test_a_view_shares_the_storage_whatever_its_base_is(kind: str) -> None:
    dtype = getattr(torch, kind)
    raw = torch.arange(96, dtype=torch.uint8)
    value = Value(0, kind, (2, 3), (1, 2), 2)
    seen = view(raw, value)
    assert (seen.dtype, seen.shape, seen.stride(), seen.storage_offset()) == (dtype, (2, 3), (1, 2), 2)
    expected = raw[: 8 * dtype.itemsize].view(dtype).as_strided((2, 3), (1, 2), 2)
    assert seen.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()
    assert raw_bytes(seen) == raw_bytes(expected)
    again = view(seen, Value(0, kind, (1,), (1,), 0))
    assert again.storage_offset() == 0, "places count from the storage, not from the base"
    again.fill_(True)
    assert raw.view(dtype)[0] == torch.ones((), dtype=dtype)
