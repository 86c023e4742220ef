"""What rows say must be so in torch, as far as its schema and tags speak of it, too."""

import pytest
import torch

from port_planner.operators.row import Cost, Filling, Operator, Reads, Result
from port_planner.operators.table import OPERATORS

BEYOND_TORCH = {"sym_numel", "sym_size", "sym_stride"}
"""Known by names that torch keeps for traced shapes: overloads without a tensor as their result."""
TAGLESS = {"copy_", "empty_like", "hardtanh_backward", "leaky_relu_backward", "zeros_like"}
"""Elementwise, though torch does not tag them so: they copy, fill, or were forgotten."""


def packet(name: str) -> torch._ops.OpOverloadPacket:
    found: torch._ops.OpOverloadPacket = getattr(torch.ops.aten, name)
    return found


def overload(name: str, suffix: str = "") -> torch._ops.OpOverload:
    found: torch._ops.OpOverload = getattr(packet(name), suffix or "default")
    return found


def first_overload(name: str) -> torch._ops.OpOverload:
    return overload(name, sorted(packet(name).overloads(), key=lambda suffix: suffix != "default")[0])


def types(name: str) -> list[str]:
    return [str(argument.type) for argument in first_overload(name)._schema.arguments]


def rows(field: str) -> list[tuple[str, Operator]]:
    empty = Operator()
    return [(name, row) for name, row in OPERATORS.items() if getattr(row, field) != getattr(empty, field)]


def is_tensor(kind: str) -> bool:
    return kind in ("Tensor", "Optional[Tensor]")


def test_torch_has_every_operator() -> None:
    assert [name for name in OPERATORS if not hasattr(torch.ops.aten, name)] == []


@pytest.mark.parametrize("field", ["sliced", "in_vectors", "commutes", "draws_by_shape"])
def test_torch_has_every_overload(field: str) -> None:
    for name, row in rows(field):
        assert {suffix or "default" for suffix in getattr(row, field)} <= set(packet(name).overloads()), name


def test_what_draws_is_tagged_so() -> None:
    for name, row in rows("draws_by_shape"):
        for suffix in row.draws_by_shape:
            assert torch.Tag.nondeterministic_seeded in overload(name, suffix).tags, name


def is_pointwise(name: str) -> bool:
    """Return whether torch tags an operator so, or what it does in place, which it does not tag."""
    packets = [packet(known) for known in {name, name.removesuffix("_")} if hasattr(torch.ops.aten, known)]
    return any(torch.Tag.pointwise in getattr(p, suffix).tags for p in packets for suffix in p.overloads())


@pytest.mark.parametrize("field", ["sliced", "in_vectors", "commutes"])
def test_what_is_elementwise_is_tagged_so(field: str) -> None:
    untagged = {name for name, _ in rows(field) if not name.startswith("_foreach_") and not is_pointwise(name)}
    assert untagged <= TAGLESS


def test_a_result_of_the_broadcast_shape_is_of_an_elementwise_operator() -> None:
    shapes = (Result.BROADCAST, Result.COMPARISON)
    assert {name for name, row in rows("result") if row.result in shapes and not is_pointwise(name)} <= TAGLESS


def test_what_runs_in_place_has_an_allowed_twin_that_writes_its_first_argument() -> None:
    for name, _ in rows("in_place"):
        first = first_overload(f"{name}_")._schema.arguments[0]
        assert OPERATORS[f"{name}_"].allowed and first.alias_info is not None and first.alias_info.is_write, name


def test_hidden_writes_are_of_tensors() -> None:
    for name, row in rows("hidden_writes"):
        assert all(is_tensor(types(name)[k]) for k in row.hidden_writes), name


def test_arguments_are_what_rows_take_them_for() -> None:
    for name, row in OPERATORS.items():
        tensors = [*(row.factors or ()), row.weight, row.shape_only, row.coordinates, row.pivots]
        tensors += [row.indices[1]] if row.indices else []
        assert all(is_tensor(types(name)[k]) for k in tensors if k is not None), name
        if row.indices:
            assert types(name)[row.indices[0]] in ("Tensor", "int"), name
        if row.index_list:
            assert types(name)[1] == "List[Optional[Tensor]]", name
        if row.over_lists or row.fused_update:
            assert types(name)[0] == "List[Tensor]", name


def test_arguments_have_the_names_that_rows_mean() -> None:
    for name, row in OPERATORS.items():
        names = [argument.name for argument in first_overload(name)._schema.arguments]
        if row.fill_number is not None:
            assert names[row.fill_number] == "fill_value"
        if row.row_operands:
            assert names[row.row_operands] == "dim"
        if row.lengths is not None:
            lengths = [argument.name for argument in overload(name, "Tensor")._schema.arguments]
            assert lengths[row.lengths : row.lengths + 2] == ["log_probs", "targets"]
        if row.result is Result.CREATED:
            assert "size" in {
                argument.name for o in packet(name).overloads() for argument in overload(name, o)._schema.arguments
            }
        if row.check is not None and "_backward" in name and row.shape_only is not None:
            assert names[row.shape_only] == "self"


def test_what_only_checks_makes_nothing() -> None:
    for name, _ in rows("checks_only"):
        assert all(not overload(name, suffix)._schema.returns for suffix in packet(name).overloads())


def test_what_reads_no_byte_or_fills_writes_nothing_that_it_is_given() -> None:
    for name, row in OPERATORS.items():
        if (row.reads is Reads.SHAPES or row.fill is not None) and name not in BEYOND_TORCH:
            assert all(argument.alias_info is None for argument in first_overload(name)._schema.arguments), name


def test_a_number_to_fill_with_is_said_where_one_is() -> None:
    assert all((row.fill is Filling.NUMBER) == (row.fill_number is not None) for row in OPERATORS.values())


def test_products_cost_what_their_factors_say() -> None:
    assert all((row.cost is Cost.PRODUCT) == (row.factors is not None) for row in OPERATORS.values())
