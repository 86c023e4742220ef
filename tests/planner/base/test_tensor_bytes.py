"""Bytes of tensors, whatever their layout."""

import pytest
import torch

from port_planner.base.tensor_bytes import chunks_of_tensor, same_bits, storage_chunks

BASE = torch.arange(700_000, dtype=torch.int32).view(700, 1000)


@pytest.mark.parametrize("tensor", [BASE, BASE.t(), BASE[:, 3:9], torch.zeros(0), torch.tensor(3.5)])
def test_chunks_are_the_tensor_row_after_row(tensor: torch.Tensor) -> None:
    chunks = [bytes(p) for p in chunks_of_tensor(tensor)]
    assert b"".join(chunks) == tensor.contiguous().numpy().tobytes()
    assert all(len(p) <= 1 << 20 for p in chunks)


def test_a_storage_has_what_its_views_do_not_show() -> None:
    assert b"".join(bytes(p) for p in storage_chunks(BASE[3:5, 2:])) == BASE.numpy().tobytes()


def test_bits_are_compared_with_data_type_shape_and_signs() -> None:
    zero, nan = torch.zeros(2, 3), torch.full((2, 3), torch.nan)
    assert same_bits(nan, nan.clone()) and same_bits(zero.t(), torch.zeros(3, 2))
    assert not same_bits(zero, -zero) and not same_bits(zero, zero.t()) and not same_bits(zero, zero.int())
