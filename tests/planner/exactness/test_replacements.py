"""What differs in a byte, or is laid out or called otherwise, is found; what is alike is run once."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.exactness import replacements as comparison
from port_planner.exactness.replacements import compared_bytes, differing
from port_planner.ir import run_op
from port_planner.ir.graph import Op, StepGraph
from port_planner.ir.torch_operators import function_of
from port_planner.tiling import tiles
from port_planner.tiling.chains import find_chains
from port_planner.tiling.gradients import split_gradients, split_gradients_by_mask
from port_planner.tiling.tiles import tile_chains
from tests.planner.exactness.wrong_halves import step, turned


def test_a_half_with_the_wrong_bits_is_found_with_where_it_differs() -> None:
    graph = step()
    (found,) = differing(graph, turned(split_gradients_by_mask(graph), 1))
    assert found.replacement == split_gradients_by_mask(graph).replacements[1]
    assert "differs in" in found.where and "bytes" in found.where


def test_a_call_that_torch_refuses_or_lays_out_otherwise_counts_as_differing() -> None:
    graph = step()
    rewritten = split_gradients(
        graph
    )  # by a convolution, whose padding may be another: on some processors the others differ in bits, too
    victim = rewritten.replacements[0]
    half = rewritten.graph.ops[victim.new[1]]
    for padding, words in (((2, 2), "aten::convolution gives"), ((-1, -1), "negative padding")):
        ops = list(rewritten.graph.ops)
        ops[victim.new[1]] = replace(half, args=(*half.args[:4], padding, *half.args[5:]))
        found = differing(graph, replace(rewritten, graph=replace(rewritten.graph, ops=tuple(ops))))
        (where,) = (one.where for one in found if one.replacement == victim)
        assert words in where


def test_no_tensor_stays_when_a_form_was_compared() -> None:
    """Planning keeps to the RAM that it plans for: nothing may wait for Python to look for cycles."""
    graph = step()
    rewritten = split_gradients_by_mask(graph)
    differing(graph, rewritten)  # whatever torch keeps of its first calls
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
        differing(graph, rewritten)
        assert sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()) == before
    finally:
        gc.enable()


def test_of_those_alike_one_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, ran = step(), []
    run = comparison._run

    def counted(*arguments: object) -> object:
        ran.append(arguments)
        return run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(comparison, "_run", counted)
    assert differing(graph, split_gradients_by_mask(graph)) == ()
    assert len(split_gradients_by_mask(graph).replacements) == 3
    assert len(ran) == 2


def test_what_comparing_holds_at_once_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 1 << 10)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Tanh(), nn.Linear(32, 1))
    deep = capture_step(
        model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(256, 32),)
    ).graphs["step"]
    halved, chained = split_gradients_by_mask(step()), tile_chains(deep, find_chains(deep, 1 << 10), 4)
    for graph, rewritten in ((step(), halved), (deep, chained)):
        assert rewritten.replacements
        for replacement in rewritten.replacements:
            alone, seen = replace(rewritten, replacements=(replacement,)), [0]
            watch(monkeypatch, seen)
            assert differing(graph, alone) == ()
            monkeypatch.undo()
            assert seen[0] == compared_bytes(graph, alone, replacement)


@pytest.mark.parametrize(("width", "threads", "cut"), [(64, 2, True), (50, 1, True), (50, 2, False)])
def test_what_vectors_round_apart_is_cut_where_threads_shares_end_with_whole_ones(
    width: int, threads: int, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers that are made up may happen to be rounded alike at the few places that lie in no vector."""
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 1 << 10)
    model = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, 1)).double()
    graph = capture_step(
        model,
        lambda m, x: m(x).square().mean(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.randn(250, 8, dtype=torch.float64),),
    ).graphs["step"]
    rewritten = tile_chains(graph, find_chains(graph, 1 << 10), 4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    monkeypatch.setattr(comparison, "made_up", lambda graph, s, *of: torch.zeros(graph.storages[s].nbytes).byte())
    try:
        found = differing(graph, rewritten)
    finally:
        torch.set_num_threads(before)
    assert rewritten.replacements and (not found) == cut
    assert all("silu rounds apart where a thread's share ends" in one.where for one in found)


def watch(monkeypatch: pytest.MonkeyPatch, seen: list[int]) -> None:
    """Note in `seen[0]` the most bytes that distinct storages take after a call: given ones, results of
    the first run, what is held.
    """
    run, call = comparison._run, comparison._call
    around: list[torch.Tensor] = []

    def running(graph: StepGraph, ops: Any, given: dict[int, torch.Tensor], *more: Any) -> dict[int, torch.Tensor]:
        around.extend(given.values())
        found = run(graph, ops, given, *more)
        around.extend(found.values())
        return found

    def calling(graph: StepGraph, i: int, held: dict[int, torch.Tensor]) -> None:
        call(graph, i, held)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*around, *held.values())}
        seen[0] = max(seen[0], sum(storages.values()))

    monkeypatch.setattr(comparison, "_run", running)
    monkeypatch.setattr(comparison, "_call", calling)


def half_step() -> StepGraph:
    """Return a step in half precision whose products have residual sums around them."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(96, 128), nn.Linear(128, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up, down = self.up(x), self.down
            return x + down(torch.nn.functional.gelu(up))

    model = nn.Sequential(Block(), Block()).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture_step(model, lambda m, x: m(x).square().mean(), optimizer, (torch.randn(128, 96).bfloat16(),)).graphs[
        "step"
    ]


def otherwise_added(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Let products with fewer rows add their terms in another order, in 32 bits, as a kernel of
    its own for few rows may.
    """

    def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        width = one.shape[1]
        order = torch.arange(width).view(2, -1).t().reshape(-1) if one.shape[0] < rows else torch.arange(width)
        total = torch.zeros(one.shape[0], other.shape[1])
        for k in order.tolist():
            total += one[:, k : k + 1].float() * other[k].float()
        return total.bfloat16()

    def of(op: Op) -> Any:
        match op.name:
            case "aten::mm":
                return product
            case "aten::addmm":
                return lambda bias, one, other: (product(one, other).float() + bias).bfloat16()
        return function_of(op)

    for module in (comparison, run_op):
        monkeypatch.setattr(module, "function_of", of)


def test_another_order_of_adding_is_found_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 1 << 10)
    graph = half_step()
    rewritten = tile_chains(graph, find_chains(graph, 1 << 12), 4)
    products = [{graph.ops[i].name for i in r.old} & {"aten::mm", "aten::addmm"} for r in rewritten.replacements]
    assert any(products) and differing(graph, rewritten) == ()
    otherwise_added(monkeypatch, 128)
    differ = differing(graph, rewritten)
    found = {one.replacement for one in differ}
    assert [r in found for r in rewritten.replacements] == [bool(of) for of in products]
    for one in differ:
        assert one.op == next(i for i in one.replacement.old if graph.ops[i].name in ("aten::mm", "aten::addmm"))


@pytest.mark.parametrize("seen", [True, False])
def test_numbers_that_do_not_cancel_hide_it(seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 1 << 10)
    model = nn.Linear(96, 16).bfloat16()
    graph = capture_step(
        model,
        lambda m, x: m(x).square().mean(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.randn(128, 96).bfloat16(),),
    ).graphs["step"]
    rewritten = tile_chains(graph, find_chains(graph, 1 << 11), 4)
    otherwise_added(monkeypatch, 128)
    if not seen:
        monkeypatch.setattr(comparison, "cancel", lambda *_: None)
    assert rewritten.replacements and bool(differing(graph, rewritten)) == seen


def test_products_are_compared_with_the_factors_that_they_are_called_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 1 << 10)
    model = nn.Linear(96, 16).bfloat16()
    graph = capture_step(
        model,
        lambda m, x: torch.addmm(m.bias, x, m.weight.t(), beta=0.5, alpha=2.0).square().mean(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.randn(128, 96).bfloat16(),),
    ).graphs["step"]
    rewritten = tile_chains(graph, find_chains(graph, 1 << 11), 4)
    called: list[dict[str, Any]] = []

    def of(op: Op) -> Any:
        function = function_of(op)
        if op.name != "aten::addmm":
            return function

        def product(*args: torch.Tensor, **factors: Any) -> Any:
            called.append(factors)
            return function(*args, **factors)

        return product

    for module in (comparison, run_op):
        monkeypatch.setattr(module, "function_of", of)
    assert differing(graph, rewritten) == ()
    assert called and all(factors == {"beta": 0.5, "alpha": 2.0} for factors in called)
