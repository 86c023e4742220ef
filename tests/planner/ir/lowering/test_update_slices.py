"""Updates that may run slice by slice: the claim that it gives the same bits, and what breaks it."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from port_planner.exactness import vector_ends
from port_planner.ir.graph import ITEM_BYTES, Argument, Op, Phase, Ref, Role, StepGraph
from port_planner.ir.lowering.update_slices import (
    SLICE_BYTES,
    may_round_apart,
    runs_in_slices,
    slice_bounds,
    update_groups,
)
from port_planner.ir.torch_operators import resolve
from port_planner.operators.table import OPERATORS
from tests.planner.steps import tiny_step


@given(st.integers(0, 40 * SLICE_BYTES), st.integers(1, 50))
def test_slices_cover_everything_once_and_begin_where_vectors_do(nbytes: int, count: int) -> None:
    if not nbytes:
        return
    bounds = slice_bounds(nbytes, count)
    assert bounds[0][0] == 0 and bounds[-1][1] == nbytes and len(bounds) <= count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert all(start % SLICE_BYTES == 0 and stop > start for start, stop in bounds)
    assert len({stop - start for start, stop in bounds[:-1]}) <= 1


SLICED = {f"aten::{name}.{overload}".removesuffix(".") for name, row in OPERATORS.items() for overload in row.sliced}

TENSORS = {"Tensor": 1, "addcmul": 2, "addcdiv": 2, "copy_": 1, "maximum": 1, "out": 1}
"""How many tensors of the same size besides the first an operator takes."""


def arguments(name: str, tensors: list[torch.Tensor]) -> list[object]:
    base, _, overload = name.removeprefix("aten::").partition(".")
    if base.startswith("lerp"):
        return [tensors[0], tensors[1], tensors[2] if overload == "Tensor" else 0.3]
    if base == "clamp_":
        return [tensors[0], 0.4, 0.8]
    if overload == "Scalar":
        return [tensors[0], 1.7]
    more = TENSORS.get(base.rstrip("_"), TENSORS.get(base, TENSORS.get(overload, 0)))
    return [*tensors[: 1 + more]]


@pytest.mark.parametrize("name", sorted(SLICED - {"aten::empty_like", "aten::maximum.out"}))
def test_an_operator_on_slices_gives_the_bits_of_the_whole(name: str) -> None:
    """Two slices and a tail that is no multiple of any vector."""
    count = 2 * SLICE_BYTES // 4 + 1003
    generator = torch.Generator().manual_seed(1)
    whole = [torch.rand(count, generator=generator) + 0.1 for _ in range(3)]
    if name.endswith("_.Tensor") and "lerp" in name:
        whole[2] = whole[2].clamp(max=1.0)
    parts = [tensor.clone() for tensor in whole]
    function = resolve(name)
    expected = function(*arguments(name, whole))
    found = []
    for start, stop in slice_bounds(4 * count, 3):
        found.append(function(*arguments(name, [tensor[start // 4 : stop // 4] for tensor in parts])))
    together = torch.cat(found)
    assert together.view(torch.int32).equal(expected.view(torch.int32))
    assert all(a.view(torch.int32).equal(b.view(torch.int32)) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "RMSprop"])
def test_each_weights_update_is_a_group_of_its_own(optimizer: str) -> None:
    graph = tiny_step(optimizer).graphs["step"]
    groups = update_groups(graph)
    parameters = [s for s, storage in enumerate(graph.storages) if storage.role is Role.PARAMETER]
    assert sorted(group.parameter for group in groups) == parameters
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        inside = range(group.first, group.last + 1)
        assert all(graph.ops[i].phase is Phase.UPDATE for i in inside)
        assert group.parameter in group.storages and group.parameter in graph.ops[group.last].writes
        assert following is None or group.last < following.first
        assert {graph.storages[s].nbytes for s in group.storages} == {group.nbytes}
        for s in group.temporaries:
            assert graph.storages[s].role is Role.TEMPORARY and set(graph.uses[s]) <= set(inside)
        assert all(runs_in_slices(graph.ops[i].name) or i in group.whole for i in inside)


def changed(graph: StepGraph, index: int, **changes: object) -> StepGraph:
    ops = list(graph.ops)
    ops[index] = replace(ops[index], **changes)  # type: ignore[arg-type]
    return replace(graph, ops=tuple(ops))


@pytest.mark.parametrize(
    "changes",
    [{"name": "aten::cumsum"}, {"random": True}],
    ids=["an element depends on others", "draws numbers"],
)
def test_a_group_with_another_operator_is_none(changes: dict[str, object]) -> None:
    graph = tiny_step("SGD").graphs["step"]
    first, *others = update_groups(graph)
    inside = next(i for i in range(first.first, first.last + 1) if i not in first.whole)
    assert update_groups(changed(graph, inside, **changes)) == tuple(others)


def test_a_group_that_takes_a_transposed_tensor_is_none() -> None:
    graph = tiny_step("SGD").graphs["step"]
    square = next(v for v in graph.values if len(v.shape) == 4 and graph.storages[v.storage].role is Role.PARAMETER)
    values = tuple(replace(v, stride=v.stride[::-1]) if v == square else v for v in graph.values)
    before, after = ({g.parameter for g in update_groups(g_)} for g_ in (graph, replace(graph, values=values)))
    assert before - after == {square.storage}


@pytest.mark.parametrize(("dtype", "sliced"), [("float32", True), ("bfloat16", False)])
def test_a_scaled_sum_that_vectors_round_apart_is_whole(dtype: str, sliced: bool) -> None:
    graph = tiny_step("SGD").graphs["step"]
    values = tuple(replace(v, dtype=dtype) for v in graph.values)
    storages = tuple(replace(s, nbytes=s.nbytes * ITEM_BYTES[dtype] // 4) for s in graph.storages)
    assert any(op.phase is Phase.UPDATE and "alpha" in dict(op.kwargs) for op in graph.ops)
    assert bool(update_groups(replace(graph, values=values, storages=storages))) == sliced


FORMS = {"whole": (4096,), "one number": (1,)}


def calls(name: str) -> Iterator[tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]]:
    """Yield calls of an operator with tensors of both forms, as places in FORMS, and with
    numbers that choose a formula.
    """
    function: Any = resolve(name)
    parameters = function._schema.arguments
    tensors = [p.name for p in parameters if isinstance(p.type, torch.TensorType) and not p.is_out]
    for forms in itertools.product(range(len(FORMS)), repeat=len(tensors) - 1):
        for number in (0.3, 1, 1.7):
            given: dict[str, Argument] = dict(zip(tensors, map(Ref, (0, *forms)), strict=True))
            given |= {p.name: Ref(0) for p in parameters if p.is_out}
            given |= {
                p.name: number for p in parameters if isinstance(p.type, torch.NumberType) or p.name in ("min", "max")
            }
            of_position = tuple(given[p.name] for p in parameters if p.name in given and not p.kwarg_only)
            yield of_position, tuple((p.name, given[p.name]) for p in parameters if p.name in given and p.kwarg_only)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
@pytest.mark.parametrize("name", sorted(SLICED - {"aten::empty_like", "aten::maximum.out"}))
def test_what_this_processor_rounds_apart_is_never_sliced(name: str, dtype: torch.dtype) -> None:
    tensors = [torch.ones(shape, dtype=dtype) for shape in FORMS.values()]
    kind = str(dtype).removeprefix("torch.")
    one = tiny_step("SGD").graphs["step"]
    values = tuple(replace(one.values[0], dtype=kind, shape=shape) for shape in FORMS.values())
    graph = replace(one, values=values)
    for args, kwargs in calls(name):
        op = replace(one.ops[0], name=name, args=args, kwargs=kwargs)
        filled = [tensors[a.value] if isinstance(a, Ref) else a for a in args]
        try:
            apart = vector_ends.rounds_apart(resolve(name), filled, dict(kwargs))
        except RuntimeError:  # torch has no such kernel
            continue
        assert may_round_apart(graph, op) or not apart, (args, kwargs)


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("aten::add_.Tensor", (Ref(0), Ref(0)), (("alpha", -0.1),)),
        ("aten::lerp_.Scalar", (Ref(0), Ref(0), 1), ()),
        ("aten::lerp_.Tensor", (Ref(0), Ref(0), Ref(0)), ()),
        ("aten::mul_.Tensor", (Ref(2), Ref(2)), ()),
    ],
)
def test_what_any_processor_may_round_apart_is_known(name: str, args: Any, kwargs: Any) -> None:
    one = tiny_step("SGD").graphs["step"]
    forms = {"bfloat16": (4096,), "float32": (1,), "complex64": (4096,)}
    graph = replace(one, values=tuple(replace(one.values[0], dtype=d, shape=shape) for d, shape in forms.items()))
    assert may_round_apart(graph, replace(one.ops[0], name=name, args=args, kwargs=kwargs))


def test_a_group_whose_temporary_is_read_outside_of_it_is_none() -> None:
    graph = tiny_step("AdamW").graphs["step"]
    group, *others = update_groups(graph)
    made = next(
        v for op in graph.ops for v in op.outputs if v is not None and graph.values[v].storage in group.temporaries
    )
    assert update_groups(replace(graph, aux=(made,))) == tuple(others)


def test_an_empty_weight_has_nothing_to_cut() -> None:
    graph = tiny_step("SGD").graphs["step"]
    group = update_groups(graph)[0]
    storages = tuple(replace(s, nbytes=0) if i in group.storages else s for i, s in enumerate(graph.storages))
    values = tuple(replace(v, shape=(0,), stride=(1,)) if v.storage in group.storages else v for v in graph.values)
    left = update_groups(replace(graph, storages=storages, values=values))
    assert group.parameter not in {other.parameter for other in left}


def test_a_forward_pass_has_no_updates() -> None:
    graph = tiny_step("SGD").graphs["step"]
    ops = tuple(op for op in graph.ops if op.phase is not Phase.UPDATE)
    assert update_groups(replace(graph, ops=ops)) == ()
    assert isinstance(ops[0], Op) and any(isinstance(a, Ref) for a in ops[0].args)
