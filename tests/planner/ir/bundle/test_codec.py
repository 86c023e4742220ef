"""Graphs, plans and costs as lists and back; and every chunk of a list that is not what it should be."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from port_planner.ir.bundle.codec import (
    MAX_NESTING,
    MAX_OPS,
    WireError,
    pack_costs,
    pack_graph,
    pack_integers,
    pack_plan,
    unpack_costs,
    unpack_graph,
    unpack_integers,
    unpack_plan,
)
from port_planner.ir.costs import Codec, CostTable, DeviceCosts, Flash, OpCost, PackingCost
from port_planner.ir.graph import NamedArgument, Ref, Scalar, Tile
from port_planner.ir.plan import Action, Decision, Plan
from tests.planner.steps import tiny_step

WHOLE = st.integers(0, 2**40)


def through(data: Any) -> Any:
    """Return what a file gives back."""
    return msgpack.unpackb(msgpack.packb(data))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_captured_graph_comes_back_as_it_was(optimizer: str) -> None:
    graph = tiny_step(optimizer).graphs["step"]
    assert unpack_graph(through(pack_graph(graph))) == graph


def test_devices_come_back_and_older_graphs_lie_on_the_cpu() -> None:
    graph = tiny_step("SGD").graphs["step"]
    assert all(len(storage) == 3 for storage in pack_graph(graph)[0]), "as agents read it that know no other device"
    moved = replace(graph, storages=tuple(replace(s, device="cuda") for s in graph.storages))
    back = unpack_graph(through(pack_graph(moved)))
    assert back == moved and back.device == "cuda" and graph.device == "cpu"


def test_teams_come_back_and_older_graphs_have_none() -> None:
    graph = tiny_step("SGD").graphs["step"]
    assert all(len(op) == 7 for op in pack_graph(graph)[2]), "as agents read it that know no teams"
    ops = tuple(
        replace(op, team=i % 3, tile=Tile(0, "a chain", 0, 1) if i % 2 else None) for i, op in enumerate(graph.ops)
    )
    divided = replace(graph, ops=ops)
    assert unpack_graph(through(pack_graph(divided))) == divided


def test_draws_come_back_and_older_graphs_draw_in_their_own_order() -> None:
    graph = tiny_step("SGD").graphs["step"]
    assert graph.draws == () and len(pack_graph(graph)) == 7, "as agents read it that know no other order"
    draws = tuple((i,) for i, op in reversed(list(enumerate(graph.ops))) if op.random)
    assert draws
    drawing = replace(graph, draws=draws)
    assert unpack_graph(through(pack_graph(drawing))) == drawing


def test_arguments_of_every_kind_come_back() -> None:
    graph = tiny_step("SGD").graphs["step"]
    odd = (None, True, -3, 0.1, "mean", NamedArgument("dtype", "float32"), (Ref(0), (1, Scalar(0)), ()), float("inf"))
    first = replace(graph.ops[0], args=odd, kwargs=(("alpha", Scalar(0)), ("out", Ref(0))))
    changed = replace(graph, ops=(first, *graph.ops[1:]), scalars=1)
    assert unpack_graph(through(pack_graph(changed))).ops[0] == first


@pytest.mark.slow
@given(
    st.lists(st.builds(Decision, WHOLE, WHOLE, WHOLE, st.sampled_from(Action)), max_size=30),
    st.permutations(range(9)),
    st.lists(st.tuples(WHOLE, WHOLE), max_size=4),
    st.one_of(st.none(), st.floats(0, 1e29)),
)
def test_any_plan_comes_back(
    decisions: list[Decision], order: list[int], sliced: list[tuple[int, int]], bound: float | None
) -> None:
    plan = Plan(tuple(decisions), tuple(order), tuple(sliced), 7, 5, 0.25, 1e-3, 0.0, bound, "greedy")
    assert unpack_plan(through(pack_plan(plan))) == plan


def test_a_plan_takes_a_few_bytes_for_each_decision() -> None:
    decisions = tuple(Decision(3 * i, 5 * i, 5 * i + 400, Action.PAGE) for i in range(1000))
    packed = pack_plan(Plan(decisions, tuple(range(5000))))[0]
    assert len(packed) < 3 * len(decisions)


def test_paging_targets_come_back_and_older_plans_page_to_flash() -> None:
    plan = Plan(tuple(Decision(0, i, i + 3, Action.PAGE, i % 3) for i in range(0, 40, 4)))
    packed = pack_plan(plan)
    assert unpack_plan(through(packed)) == plan
    older = unpack_plan(through(packed[:3]))
    assert older == Plan(tuple(replace(d, target=0) for d in plan.decisions)) and len(pack_plan(older)) == 3
    for targets in ([0] * 9, [-1] * 10):
        with pytest.raises(WireError, match="paging targets"):
            unpack_plan([*packed[:3], pack_integers(targets)])


@given(st.lists(st.integers(-(2**62), 2**62), max_size=50))
def test_integers_come_back(numbers: list[int]) -> None:
    assert unpack_integers(pack_integers(numbers), most=50) == numbers


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    try:
        assert len(unpack_integers(data, most=20)) <= 20
    except WireError:
        return


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not compressed", "packed integers are damaged"),
        (pack_integers(range(100))[:-4], "truncated"),
        (pack_integers(range(9)), "there are 9 packed integers; the maximum is 8"),
        (pack_integers([0] * 1000), "truncated, or there are too many"),
        (pack_integers([1 << 80]), "a packed integer has more than 64 bits"),
    ],
)
def test_integers_that_are_none(data: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        unpack_integers(data, most=8)


COSTS = CostTable(
    DeviceCosts("pi", 5, 2.0, 3.0, Flash("card", 1e7, 2e7, 1e-4, 1e-9, 2e-9, 1e12), 4), (OpCost(1.0, 7, 2.0),) * 2
)


@pytest.mark.parametrize("endurance", [None, 1e12])
def test_costs_come_back(endurance: float | None) -> None:
    costs = replace(COSTS, device=replace(COSTS.device, flash=replace(COSTS.device.flash, endurance_bytes=endurance)))
    assert unpack_costs(through(pack_costs(costs))) == costs
    disk = replace(costs.device.flash, name="disk")
    costs = replace(costs, device=replace(costs.device, scratch_targets=(disk, disk)))
    assert unpack_costs(through(pack_costs(costs))) == costs
    host = replace(disk, name="host memory", capacity_bytes=1 << 30)
    costs = replace(costs, device=replace(costs.device, scratch_targets=(disk, host), host_base_bytes=300 << 20))
    assert unpack_costs(through(pack_costs(costs))) == costs and costs.device.host == host
    assert len(pack_costs(COSTS)[0]) == 5, "what readers from before devices had memory of their own expect"
    shares = replace(COSTS, device=replace(COSTS.device, shares_pages=True))
    assert unpack_costs(through(pack_costs(shares))) == shares


def test_what_packing_takes_comes_back_and_costs_without_it_are_as_they_were() -> None:
    packings = (
        PackingCost(3, 1, Codec.BITMAP, 4, 0.5, 700, 1e-3, 2e-3, 0.1),
        PackingCost(4, 2, Codec.BITS, 1, 1.0, 8, 0.0, 0.0, 0.0),
    )
    costs = replace(COSTS, packings=packings)
    assert unpack_costs(through(pack_costs(costs))) == costs
    assert len(pack_costs(COSTS)) == 3, "what readers from before plans could pack expect"
    for place, value, message in (
        (2, "gzip", "Invalid enum value 'gzip'"),
        (4, 1.5, "<= 1"),
        (3, 9, "<= 8"),
        (0, -1, ">= 0"),
    ):
        with pytest.raises(WireError, match=message):
            unpack_costs(at(4, 0, place, value=value)(through(pack_costs(costs))))


def at(*path: int, value: Any) -> Callable[[Any], Any]:
    """Return a change of one place in nested lists."""

    def change(data: Any) -> Any:
        place = data
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        return data

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at(0, 0, value=7), r"Expected `str`, got `int` - at `\$\[0\]\[0\]`"),
        (at(0, 0, value="x" * 1001), "length <= 1000"),
        (at(0, 1, value=True), "Expected `int`, got `bool`"),
        (at(0, 1, value=0.5), "Expected `int`, got `float`"),
        (at(0, 1, value=-1), r"Expected `int` >= 0 - at `\$\[0\]\[1\]`"),
        (at(0, 1, value=1 << 62), "Expected `int` <"),
        (at(0, 2, value=-1.0), "Expected `float` >= 0"),
        (at(0, 2, value=float("nan")), "Expected `float`"),
        (at(0, 2, value=float("inf")), "Expected `float`"),
        (at(1, 1, value=0), "Expected `float` > 0"),
        (at(1, 6, value=0.0), "Expected `float` > 0"),
        (at(1, value=[1]), "length"),
        (at(2, 0, value=[1.0, 2]), "length"),
        (at(2, value={}), "Expected `array`, got `object`"),
    ],
)
def test_costs_that_are_none(change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(WireError, match=f"a cost table cannot be read: .*{message}"):
        unpack_costs(change(through(pack_costs(COSTS))))


def test_a_machine_has_a_thread_at_least() -> None:
    assert unpack_costs(at(0, 4, value=0)(through(pack_costs(COSTS)))).device.threads == 1


def deep(levels: int) -> Any:
    data: Any = 1
    for _ in range(levels):
        data = [data]
    return data


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (deep(MAX_NESTING + 1), f"nested deeper than {MAX_NESTING} lists"),
        ({"v": -1}, "an argument cannot be read: Expected `int` >= 0"),
        ({"v": 0, "s": 0}, "which is not a valid number, tensor or list"),
        ({"v": None}, "which is not a valid number, tensor or list"),
        ({"x": 0}, "an argument cannot be read: .*unknown field `x`"),
        ({"n": ["dtype"]}, "an argument cannot be read: .*length 2"),
        (b"bytes", "which is not a valid number, tensor or list"),
    ],
)
def test_arguments_that_are_none(argument: Any, message: str) -> None:
    packed = through(pack_graph(tiny_step("SGD").graphs["step"]))
    packed[2][0][1] = [argument]
    with pytest.raises(WireError, match=message):
        unpack_graph(packed)


def test_more_operators_than_any_model_has_are_not_looked_at() -> None:
    packed = through(pack_graph(tiny_step("SGD").graphs["step"]))
    packed[2] = [0] * (4 * MAX_OPS + 1)
    with pytest.raises(WireError, match=f"length <= {4 * MAX_OPS}"):
        unpack_graph(packed)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([3, 0], "a plan ends before its 3 decisions and 0 operators do"),
        ([0, 2, 0], "a plan ends before its 0 decisions and 2 operators do"),
        ([0, 0, 5], "a plan ends before"),
        ([-1, 0], "a plan claims -1 decisions"),
        ([0, MAX_OPS + 1], "over an order of 200001 operators"),
        ([0, 2, 1, 1], "a plan's order is not a permutation"),
        ([1, 0, 0, 0, 1, 9], "an action cannot be read: Invalid enum value 9"),
    ],
)
def test_plans_that_are_none(numbers: list[int], message: str) -> None:
    with pytest.raises(WireError, match=message):
        unpack_plan([pack_integers(numbers), [0, 0, 0.0, 0.0, 0.0, None], "greedy"])


def test_what_operators_take_beside_a_device_and_on_the_other_one_comes_back() -> None:
    beside = replace(COSTS, ops=(OpCost(1.0, 0, 2.0, 9), OpCost(1.0, 7, 2.0)))
    assert unpack_costs(through(pack_costs(beside))) == beside
    divided = replace(beside, elsewhere=(None, OpCost(3.0, 0, 1.0, 5)))
    assert unpack_costs(through(pack_costs(divided))) == divided
    assert pack_costs(COSTS)[2] == [[1.0, 7, 2.0]] * 2, "what readers from before operators were divided expect"
    with pytest.raises(WireError, match="2 operators on their devices and 1 on the others"):
        unpack_costs(through(pack_costs(replace(divided, elsewhere=(None,)))))
    with pytest.raises(WireError, match="a cost table cannot be read"):
        unpack_costs(at(2, 0, 3, value=-1)(through(pack_costs(beside))))
