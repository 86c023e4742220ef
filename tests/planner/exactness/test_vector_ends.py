"""Numbers that are computed in vectors or one by one, and where that shows."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from port_planner.base.tensor_bytes import same_bits
from port_planner.exactness.vector_ends import MIN_SHARE, in_whole_vectors, rounds_apart
from port_planner.operators.row import VECTOR

ATEN = torch.ops.aten


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_shares_are_whole_vectors_where_each_but_the_last_is() -> None:
    assert in_whole_vectors(2 * 1000 * VECTOR + 7, 1)
    assert in_whole_vectors(2 * 1000 * VECTOR, 2) and in_whole_vectors(6 * 1000 * VECTOR, 3)
    assert not in_whole_vectors(2 * 1000 * VECTOR + 7, 2)
    assert in_whole_vectors(2000, 8), "one thread takes so few"
    assert not in_whole_vectors(3 * MIN_SHARE // 2 + VECTOR, 3)


@pytest.mark.parametrize(
    ("func", "arguments", "kwargs"),
    [
        (ATEN.add.Tensor, ("x", "x"), {}),
        (ATEN.mul.Tensor, ("x", "one"), {}),
        (ATEN.lerp_.Scalar, ("x", "x", 0.1), {}),
        (ATEN.addcmul_.default, ("x", "x", "x"), {"value": 0.01}),
        (ATEN.copy_.default, ("x", "x"), {}),
        (ATEN._foreach_mul_.Scalar, (["x", "x"], 0.9), {}),
        (ATEN.masked_fill.Scalar, ("x", "mask", -1.0), {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_rounded_alike_everywhere_is_known(
    func: Any, arguments: Any, kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    tensors = {"x": torch.ones(4, dtype=dtype), "one": torch.ones((), dtype=dtype), "mask": torch.ones(4) > 0}
    args = [
        [tensors[a] for a in argument] if isinstance(argument, list) else tensors.get(argument, argument)
        for argument in arguments
    ]
    assert not rounds_apart(func, args, kwargs)


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (ATEN.maximum.default, (torch.randn(9), torch.randn(9)), {}),
        (ATEN.maximum.default, (torch.randn(9).bfloat16(), torch.randn(9).bfloat16()), {}),
    ],
)
def test_what_rounds_apart_is_found(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    assert rounds_apart(func, args, kwargs), "zeros have a sign"


def test_what_rounds_apart_shows_at_the_ends_of_shares_and_only_there(two_threads: None) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(2, 2 * 1000 * VECTOR + 2 * (VECTOR - 1)).bfloat16()
    scaled = {"alpha": 0.3}
    apart = rounds_apart(ATEN.add.Tensor, (*numbers,), scaled)
    for count in (2 * 1000 * VECTOR, numbers.shape[1]):
        x, y = numbers[0, :count].clone(), numbers[1, :count].clone()
        tiles = [ATEN.add(a, b, **scaled) for a, b in zip(x.split(1000 * VECTOR), y.split(1000 * VECTOR), strict=True)]
        assert same_bits(ATEN.add(x, y, **scaled), torch.cat(tiles)) == (in_whole_vectors(count, 2) or not apart)
