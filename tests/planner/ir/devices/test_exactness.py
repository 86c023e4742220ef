"""Which operators of a step do not repeat on its device: named with their source, and only where the call does not."""

from dataclasses import replace

import pytest

from port_planner.ir.devices.exactness import REORDERED, reordered_operators
from port_planner.ir.graph import Op, Phase, Ref, Role, StepGraph, Storage, Value
from port_planner.operators import operator_of


def graph(device: str, op: str, *more: object, dtype: str = "float32", index: str = "int64") -> StepGraph:
    """Return a step of one operator on a tensor, an index and what else it takes."""
    storages = (
        Storage(16, Role.BATCH, "x", device),
        Storage(16, Role.BATCH, "i", device),
        Storage(16, Role.TEMPORARY, "", device),
    )
    values = (Value(0, dtype, (4,), (1,), 0), Value(1, index, (4,), (1,), 0), Value(2, dtype, (4,), (1,), 0))
    made = Op(op, (Ref(0), *more), (), (2,), (), Phase.FORWARD)  # type: ignore[arg-type]
    return StepGraph(storages, values, (made,), (0, 1), 2, ())


def test_every_name_is_an_operator_that_a_step_may_use() -> None:
    for table in REORDERED.values():
        assert all(operator_of(name).allowed for name in table)
        assert all(table.values()), "each with its source"


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_an_operator_that_adds_with_atomics_is_named(device: str) -> None:
    assert list(reordered_operators(graph(device, "aten::index_add", 0, Ref(1), Ref(0)))) == ["index_add"]
    assert reordered_operators(graph("cpu", "aten::index_add", 0, Ref(1), Ref(0))) == {}
    assert reordered_operators(graph(device, "aten::mm", Ref(0))) == {}


@pytest.mark.parametrize(
    ("op", "more", "changes", "named"),
    [
        ("aten::index_put", ((Ref(1),), Ref(0), False), {}, True),
        ("aten::index_put", ((Ref(1),), Ref(0)), {}, True),
        ("aten::index_put", ((Ref(1),), Ref(0), True), {}, False),  # sorted first
        ("aten::index_put_", ((Ref(1),), Ref(0), False), {"index": "bool"}, False),  # a mask names no place twice
        ("aten::scatter.src", (0, Ref(1), Ref(0)), {}, True),
        ("aten::scatter.value", (0, Ref(1), 1.0), {}, False),
        ("aten::median", (), {}, False),
        ("aten::median.dim", (0,), {}, True),
        ("aten::cumsum", (0,), {}, True),
        ("aten::cumsum", (0,), {"dtype": "int64"}, False),
    ],
)
def test_what_repeats_in_some_calls_is_named_in_the_others(
    op: str, more: tuple[object, ...], changes: dict[str, str], named: bool
) -> None:
    step = graph("cuda", op, *more, **changes)
    assert bool(reordered_operators(step)) is named
    assert replace(step, storages=tuple(replace(s, device="cpu") for s in step.storages)).device == "cpu"


def test_of_a_divided_step_only_what_runs_on_the_device_is_named() -> None:
    there = graph("cuda", "aten::index_add", 0, Ref(1), Ref(0))
    here = replace(
        there, storages=(*(replace(s, device="cpu") for s in there.storages), Storage(4, Role.BATCH, "y", "cuda"))
    )
    assert here.device == "cuda" and reordered_operators(here) == {} and reordered_operators(there)
