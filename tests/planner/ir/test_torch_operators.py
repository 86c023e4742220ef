"""The operators of a plan are those of this torch, or named."""

from dataclasses import replace

import pytest
import torch

from port_planner.ir.allowed_operators import OperatorError
from port_planner.ir.graph import Argument, GraphError, NamedArgument, Op, Phase, Ref, Role, StepGraph, Storage, Value
from port_planner.ir.torch_operators import COMPLEX, check_arguments, function_of, named, resolve


def test_an_operator_that_this_torch_does_not_have_is_named() -> None:
    with pytest.raises(OperatorError, match="has no operator"):
        resolve("aten::add.NoSuchOverload")


@pytest.mark.parametrize("name", ["aten::avg_pool2d_backward.grad_input", "aten::sort.values", "aten::topk.values"])
def test_an_operator_that_writes_into_a_given_tensor_is_refused(name: str) -> None:
    with pytest.raises(OperatorError, match="writes into a tensor it is given"):
        resolve(name)


@pytest.mark.parametrize("number", [1j, -0.0 + 2.5j, complex("inf"), complex(1e-300, -0.0)])
def test_complex_numbers_are_spelled(number: complex) -> None:
    assert repr(named(NamedArgument(COMPLEX, repr(number)))) == repr(number)


@pytest.mark.parametrize(
    "argument",
    [
        NamedArgument(COMPLEX, "2 + 1j"),
        NamedArgument(COMPLEX, "x"),
        NamedArgument("dtype", "object"),
        NamedArgument("os", "1j"),
    ],
)
def test_an_object_that_is_not_torchs_is_refused(argument: NamedArgument) -> None:
    with pytest.raises(GraphError, match="not supported"):
        named(argument)


def one_call(name: str, *args: Argument, writes: tuple[int, ...] = ()) -> tuple[Op, StepGraph]:
    """Return a call on two storages, and the graph of it."""
    op = Op(name, args, (), (), writes, Phase.FORWARD)
    storages = (Storage(16, Role.BATCH, "a"), Storage(16, Role.BATCH, "b"))
    values = tuple(Value(s, "float32", (4,), (1,), 0) for s in range(2))
    return op, StepGraph(storages, values, (op,), (0, 1), 0)


def test_a_call_without_its_tensor_is_refused() -> None:
    with pytest.raises(GraphError, match="without its tensor self"):
        check_arguments(*one_call("aten::copy", None, Ref(1)))
    check_arguments(*one_call("aten::clamp.Tensor", Ref(0), None, Ref(1)))


def test_a_change_that_the_graph_does_not_name_is_refused() -> None:
    with pytest.raises(GraphError, match="changes a storage"):
        check_arguments(*one_call("aten::copy_", Ref(0), Ref(1), writes=(1,)))
    check_arguments(*one_call("aten::copy_", Ref(0), Ref(1), writes=(0,)))
    with pytest.raises(GraphError, match="changes a storage"):
        op, graph = one_call("aten::maximum.out", Ref(0), Ref(1))
        check_arguments(replace(op, kwargs=(("out", Ref(1)),)), graph)


@pytest.mark.parametrize("recorded", [3, 4])
def test_a_recurrent_layer_keeps_a_workspace_where_the_recorded_one_did(recorded: int) -> None:
    """Whether gradients are recorded when it is repeated does not matter."""
    op = Op("aten::mkldnn_rnn_layer", (), (), (None,) * recorded, (), Phase.FORWARD)
    rows, weights = torch.randn(4, 3, 5), (torch.randn(24, 5), torch.randn(24, 6), torch.randn(24), torch.randn(24))
    flags: tuple[object, ...] = (False, [], 2, 6, 1, True, False, False, True)
    with torch.no_grad():
        made = function_of(op)(rows, *weights, torch.zeros(3, 6), torch.zeros(3, 6), *flags)
    assert len([tensor for tensor in made if tensor is not None]) == recorded
