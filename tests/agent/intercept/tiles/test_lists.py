"""Operators over lists, element by element."""

from typing import Any

import pytest
import torch

from port_agent.intercept.tiles.lists import runs_by_element, split_call

ADD = torch.ops.aten._foreach_add.List
ADD_IN_PLACE = torch.ops.aten._foreach_add_.List


def call(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def test_only_lists_that_are_large_for_the_limit_are_split() -> None:
    rows = [torch.ones(1024) for _ in range(4)]
    assert runs_by_element(ADD, (rows, rows), 64 << 10)
    assert not runs_by_element(ADD, (rows, rows), 1 << 20)
    assert not runs_by_element(torch.ops.aten.cat.default, (rows,), 1)


def test_the_results_are_those_of_the_whole_call() -> None:
    left, right = ([torch.randn(n) for n in (3, 0, 7)] for _ in range(2))
    seen: list[int] = []

    def counted(func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(len(args[0]))
        return call(func, args, kwargs)

    made = split_call(ADD, (left, right), {"alpha": 2}, counted)
    assert seen == [1, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(made, ADD(left, right, alpha=2), strict=True))
    expected = [a + b for a, b in zip(left, right, strict=True)]
    assert split_call(ADD_IN_PLACE, (left, right), {}, call) is None
    assert all(torch.equal(a, b) for a, b in zip(left, expected, strict=True))


def test_empty_lists_are_one_call() -> None:
    assert split_call(ADD_IN_PLACE, ([], []), {}, lambda func, args, kwargs: "once") == "once"


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (ADD_IN_PLACE, ([torch.ones(3), torch.ones(3)], [torch.ones(3)])),
        (torch.ops.aten._foreach_mul_.ScalarList, ([torch.ones(3), torch.ones(3)], [2.0, 2.0, 2.0])),
        (
            torch.ops.aten._foreach_addcmul_.Tensor,
            ([torch.ones(3)] * 2, [torch.ones(3)] * 2, [torch.ones(3)] * 2, torch.ones(3)),
        ),
    ],
    ids=["tensors", "numbers", "a tensor of numbers"],
)
def test_lists_of_different_lengths_are_the_error_of_the_whole_call(func: Any, args: Any) -> None:
    with pytest.raises(RuntimeError):
        split_call(func, args, {}, call)
    assert all(torch.equal(t, torch.ones(3)) for t in args[0]), "nothing was changed before"


def test_a_tensor_of_numbers_gives_each_element_its_own() -> None:
    first, second, numbers = torch.ones(3), torch.ones(4), torch.tensor([2.0, 3.0])
    ones = [torch.ones(3), torch.ones(4)]
    split_call(torch.ops.aten._foreach_addcmul_.Tensor, ([first, second], ones, ones, numbers), {}, call)
    assert (first[0].item(), second[0].item()) == (3.0, 4.0)
