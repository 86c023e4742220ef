"""An operator runs on what its caller fetches, at once or compiled; views of a storage under other dtypes."""

import pytest
import torch

from port_planner.ir.graph import NamedArgument, Op, Phase, Ref, Scalar, Value
from port_planner.ir.run_op import call, compiled, fetcher, fill, fill_all, flatten, view

ADD = Op("aten::add.Tensor", (Ref(0), Ref(1)), (("alpha", Scalar(1)),), (2,), (), Phase.FORWARD)
CAT = Op("aten::cat", ((Ref(1), Ref(0)),), (), (2,), (), Phase.FORWARD)
VALUES = (torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
NUMBERS = (3.0, 2.0)


def test_arguments_are_filled_with_what_is_fetched() -> None:
    assert fill_all(ADD, VALUES.__getitem__, NUMBERS.__getitem__) == ([VALUES[0], VALUES[1]], {"alpha": 2.0})
    assert fill(Scalar(0), VALUES.__getitem__) == 0.5, "as it usually is"
    assert fill((1, NamedArgument("dtype", "int64")), VALUES.__getitem__) == [1, torch.int64]
    assert fill((NamedArgument("device", "cpu"), None), VALUES.__getitem__, constant=str)[1] == "None"


@pytest.mark.parametrize(("op", "expected"), [(ADD, [21.0, 42.0]), (CAT, [10.0, 20.0, 1.0, 2.0])])
def test_an_operator_gives_the_same_at_once_and_compiled(op: Op, expected: list[float]) -> None:
    (made,) = call(op, VALUES.__getitem__, NUMBERS.__getitem__)
    present = list(VALUES)

    def given(argument: object) -> object:
        return fetcher(argument, lambda v: lambda: present[v], lambda i: lambda: NUMBERS[i])  # type: ignore[arg-type]

    run = compiled(op, [given(a) for a in op.args], [(k, given(a)) for k, a in op.kwargs])  # type: ignore[misc]
    assert made.tolist() == run().tolist() == expected
    present[0] = torch.zeros(2)
    assert run().tolist() != expected, "of what is there at the time"


def test_lists_of_tensors_are_flat_and_numbers_are_none() -> None:
    one, other = VALUES
    assert [id(t) for t in flatten([one, (other, [one])])] == [id(one), id(other), id(one)]
    assert [len(flatten(result)) for result in (one, None, 1.5, True, [None, one])] == [1, 0, 0, 0, 1]


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
