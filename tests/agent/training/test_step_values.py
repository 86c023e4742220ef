"""Storages and values of a step under way: a view for each value, no more than what was
recorded, nothing kept too long.
"""

import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from port_agent.training.state.finite import NonFiniteError
from port_agent.training.step_values import GraphChangedError, StepValues, check_layout
from port_planner.base.errors import PortError
from port_planner.ir.graph import (
    Argument,
    GraphError,
    NamedArgument,
    Op,
    Phase,
    Ref,
    Role,
    Scalar,
    StepGraph,
    Storage,
    Value,
)
from tests.simulated_device import NAME, SimBackend

GRAPH = StepGraph(
    storages=(Storage(24, Role.BATCH, "x"), Storage(24, Role.TEMPORARY, ""), Storage(4, Role.TEMPORARY, "")),
    values=(
        Value(0, "float32", (2, 3), (3, 1), 0),
        Value(1, "float32", (2, 3), (1, 2), 0),
        Value(1, "float32", (2,), (1,), 4),
        Value(2, "float32", (), (), 0),
    ),
    ops=(),
    batch=(0,),
    loss=3,
    scalars=2,
)
ADD = Op("aten::add.Tensor", (Ref(0), Ref(1)), (("alpha", Scalar(1)),), (1,), (), Phase.FORWARD)


@pytest.fixture
def values() -> StepValues:
    return StepValues(GRAPH)


def test_a_value_is_a_view_that_is_made_once_and_shares_its_storage(values: StepValues) -> None:
    values.base[1] = torch.arange(6, dtype=torch.float32).view(torch.uint8)
    whole, tail = values.value(1), values.value(2)
    assert whole.tolist() == [[0, 2, 4], [1, 3, 5]] and tail.tolist() == [4, 5]
    assert values.value(1) is whole
    tail.fill_(9)
    assert whole.tolist() == [[0, 2, 9], [1, 3, 9]]


def test_what_an_operator_gave_becomes_the_base_unless_there_is_one(values: StepValues) -> None:
    first, second = torch.zeros(2, 3), torch.ones(2)
    values.bind(1, first)
    values.bind(2, second)
    assert values.base[1] is first and values.value(2) is second


def test_a_storage_that_is_let_go_of_is_freed_with_all_its_values(values: StepValues) -> None:
    made = torch.zeros(6)
    gone = weakref.ref(made)
    values.base[1] = made
    values.value(1), values.value(2)
    values.bind(3, torch.zeros(()))
    del made
    values.clear(1)
    assert gone() is None and values.env[1:3] == [None, None]
    assert values.env[3] is not None
    with pytest.raises(PortError, match="storage 1 is not resident, which is a defect of the program; report this"):
        values.value(1)


def test_a_batch_in_the_recorded_layout_is_taken_as_it_is(values: StepValues) -> None:
    x = torch.randn(2, 3)
    values.load_batch([x])
    assert values.value(0) is x


@pytest.mark.parametrize(
    "x",
    [torch.randn(3, 2).T, torch.randn(4, 3)[::2], torch.randn(3, 3)[1:], torch.randn(1, 3).expand(2, 3)],
    ids=["transposed", "every other row", "a part", "expanded"],
)
def test_a_batch_in_another_layout_is_copied_into_the_recorded_one(values: StepValues, x: torch.Tensor) -> None:
    values.load_batch([x])
    taken = values.value(0)
    assert torch.equal(taken, x) and (taken.stride(), taken.storage_offset()) == ((3, 1), 0)


@pytest.mark.parametrize(
    ("x", "found"),
    [
        (torch.zeros(1, 3), r"shape \[1, 3\] torch.float32"),
        (torch.zeros(2, 3, dtype=torch.float64), r"shape \[2, 3\] torch.float64"),
    ],
)
def test_a_batch_of_another_shape_or_kind_is_refused(values: StepValues, x: torch.Tensor, found: str) -> None:
    with pytest.raises(GraphChangedError, match=rf"{found}, but the plan was made for \[2, 3\] float32"):
        values.load_batch([x])
    with pytest.raises(ValueError, match="shorter"):
        values.load_batch([])


def test_an_operator_is_called_on_what_is_there_when_it_runs(values: StepValues) -> None:
    call = values.caller(ADD, ADD.args)
    for x, alpha in ((1.0, 2.0), (5.0, 0.5)):
        values.clear(0), values.clear(1)
        values.load_batch([torch.full((2, 3), x)])
        values.base[1] = torch.ones(6)
        values.scalars = (7, alpha)
        assert torch.equal(call(), torch.full((2, 3), x + alpha))
    without = values.caller(replace(ADD, kwargs=()), (Ref(0), 3))
    assert torch.equal(without(), torch.full((2, 3), 8.0))


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (3.5, 3.5),
        (None, None),
        ("mean", "mean"),
        (Scalar(1), 0.5),
        (NamedArgument("dtype", "float64"), torch.float64),
        ((1, (2, 3)), [1, [2, 3]]),
        ((Scalar(0), (Scalar(1), 2)), [7, [0.5, 2]]),
    ],
)
def test_arguments_that_are_no_tensors(values: StepValues, argument: Argument, expected: object) -> None:
    values.scalars = (7, 0.5)
    fetched = values.fetcher(argument)()
    assert (list(fetched) if isinstance(fetched, tuple | list) else fetched) == expected


def test_a_list_of_tensors_is_fetched_anew_each_time(values: StepValues) -> None:
    fetch = values.fetcher((Ref(3), None, Ref(0)))
    for _ in range(2):
        loss, x = torch.zeros(()), torch.zeros(2, 3)
        values.clear(0), values.clear(2)
        values.bind(3, loss)
        values.load_batch([x])
        got = fetch()
        assert got[0] is loss and got[1] is None and got[2] is x


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, dtype=torch.float64).T,
        torch.zeros(2, 3),
        torch.zeros(3, 3).T[:2],
        torch.zeros(7)[1:].view(3, 2).T,
    ],
    ids=["dtype", "stride", "size of its storage", "offset"],
)
def test_what_an_operator_gives_must_lie_as_recorded(tensor: torch.Tensor) -> None:
    check_layout(ADD, GRAPH.values[1], torch.zeros(3, 2).T)
    with pytest.raises(
        GraphChangedError, match=r"aten::add.Tensor gave a tensor .*, but recorded was float32 \(2, 3\) \(1, 2\) 0"
    ):
        check_layout(ADD, GRAPH.values[1], tensor)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -3e38])
def test_coordinates_that_no_image_has_never_reach_the_operator(bad: float) -> None:
    """torch turns NaN into an address there."""
    shapes = ((1, 1, 2, 2), (1, 2, 2, 2))
    graph = StepGraph(
        tuple(Storage(4 * math.prod(shape), Role.BATCH, str(i)) for i, shape in enumerate(shapes)),
        tuple(Value(i, "float32", shape, (8, 4, 2, 1), 0) for i, shape in enumerate(shapes)),
        (),
        (0, 1),
        0,
    )
    values = StepValues(graph)
    values.bind(0, torch.ones(shapes[0]))
    op = Op("aten::grid_sampler_2d", (Ref(0), Ref(1), 0, 0, False), (), (), (), Phase.FORWARD)
    call = values.caller(op, op.args)
    values.bind(1, torch.zeros(shapes[1]))
    assert call().shape == (1, 1, 2, 2)
    values.value(1)[0, 1, 1, 0] = bad
    with pytest.raises(NonFiniteError, match="which are outside any image"):
        call()
    named = replace(op, args=(Ref(0),), kwargs=(("grid", Ref(1)),))
    with pytest.raises(GraphError, match="without its coordinates"):
        values.caller(named, named.args)


@pytest.mark.parametrize(("label", "length"), [(6, 3), (-1, 3), (1 << 40, 3), (6, 2)])
def test_labels_that_are_no_class_never_reach_a_ctc_loss(label: int, length: int) -> None:
    """torch turns them into addresses there, but for those beyond a sample's length."""
    shapes, kinds = ((5, 1, 6), (1, 3), (1,), (1,)), ("float32", "int64", "int64", "int64")
    graph = StepGraph(
        tuple(Storage(8 * math.prod(shape), Role.BATCH, str(i)) for i, shape in enumerate(shapes)),
        tuple(
            Value(i, kind, shape, torch.empty(shape).stride(), 0)
            for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
        ),
        (),
        tuple(range(len(shapes))),
        0,
    )
    values = StepValues(graph)
    log_probs, labels = torch.randn(shapes[0]).log_softmax(-1), torch.tensor([[1, 2, label]])
    for v, tensor in enumerate((log_probs, labels, torch.tensor([5]), torch.tensor([length]))):
        values.bind(v, tensor)
    op = Op("aten::_ctc_loss.Tensor", tuple(map(Ref, range(4))), (), (), (), Phase.FORWARD)
    call = values.caller(op, op.args)
    if length < labels.shape[1]:
        assert call()[0].isfinite()
    else:
        with pytest.raises(IndexError, match="out of bounds"):
            call()
    for args, kwargs in (
        (op.args[:1], (("targets", Ref(1)),)),
        ((3, *op.args[1:]), ()),
        ((*op.args[:1], 3, *op.args[2:]), ()),
    ):
        named = replace(op, args=args, kwargs=kwargs)
        with pytest.raises(GraphError, match="without its labels"):
            values.caller(named, named.args)


@pytest.mark.parametrize("repeats", [[0, (1 << 62) - 1, -(1 << 62), 3], [1 << 62] * 4, [1, -1]])
def test_repeats_that_cannot_be_counted_never_reach_torch(repeats: list[int]) -> None:
    """torch adds them up in 64 bits, and writes as often as each says."""
    graph = StepGraph(
        (Storage(8 * len(repeats), Role.BATCH, "0"),), (Value(0, "int64", (len(repeats),), (1,), 0),), (), (0,), 0
    )
    values = StepValues(graph)
    op = Op("aten::repeat_interleave.Tensor", (Ref(0),), (), (), (), Phase.FORWARD)
    values.bind(0, torch.tensor(repeats))
    with pytest.raises(IndexError, match="repeats"):
        values.caller(op, op.args)()
    values.bind(0, torch.arange(len(repeats)))
    assert values.caller(op, op.args)().numel() == sum(range(len(repeats)))
    for args, kwargs in (((), (("repeats", Ref(0)),)), ((3,), ())):
        with pytest.raises(GraphError, match="without its repeats"):
            values.caller(replace(op, args=args, kwargs=kwargs), args)


class NoDoubles(TorchDispatchMode):
    """Refuses numbers of 64 bits on the simulated device, as Apple's GPU does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype is torch.float64 and made.device.type == NAME:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return made


@pytest.mark.own_process
def test_repeats_are_counted_where_there_are_numbers_for_it() -> None:
    backend = SimBackend()
    graph = StepGraph((Storage(24, Role.BATCH, "0", NAME),), (Value(0, "int64", (3,), (1,), 0),), (), (0,), 0)
    values = StepValues(graph, backend)
    op = Op("aten::repeat_interleave.Tensor", (Ref(0),), (), (), (), Phase.FORWARD)
    values.bind(0, torch.tensor([1, 0, 2]).to(NAME))
    with NoDoubles():
        assert values.caller(op, op.args)().cpu().tolist() == [0, 2, 2]
