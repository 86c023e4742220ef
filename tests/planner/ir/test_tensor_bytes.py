"""Bytes of tensors, whatever their layout."""

import pytest
import torch

from planner.ir.tensor_bytes import storage_pieces, tensor_pieces

BASE = torch.arange(700_000, dtype=torch.int32).view(700, 1000)


@pytest.mark.parametrize("tensor", [BASE, BASE.t(), BASE[:, 3:9], torch.zeros(0), torch.tensor(3.5)])
def test_pieces_are_the_tensor_row_after_row(tensor: torch.Tensor) -> None:
    pieces = [bytes(p) for p in tensor_pieces(tensor)]
    assert b"".join(pieces) == tensor.contiguous().numpy().tobytes()
    assert all(len(p) <= 1 << 20 for p in pieces)


def test_a_storage_has_what_its_views_do_not_show() -> None:
    assert b"".join(bytes(p) for p in storage_pieces(BASE[3:5, 2:])) == BASE.numpy().tobytes()
