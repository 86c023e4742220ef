"""Whole, in halves or in tiles: the cheapest within the budget."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from port_agent.prepare.tiling import comparing
from port_agent.prepare.tiling import tiling_search as ways_to_cut
from port_agent.prepare.tiling.choice import again_with_base, best_candidate
from port_agent.prepare.tiling.split_gradients import with_split_gradients
from port_agent.prepare.tiling.tiled_job import PlanCost, TiledJob, cost_of_plan
from port_planner import make_bundle
from port_planner.exactness.replacements import Difference
from port_planner.ir.costs import CostTable, DeviceCosts, OpCost
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.job import TrainingJob
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.floor import floor_of
from port_planner.search.plan_step import PlanResult
from port_planner.tiling import tiles
from port_planner.tiling.rewriting import Replacement
from port_planner.tiling.tilings import Tiling, kinds, tile_fat
from tests.agent.exactness import OPTIMIZERS
from tests.agent.prepare.tiling.small_jobs import GREEDY, ROOM, adapted_job, chosen, ops_by_bytes, whole
from tests.planner.steps import costs_of
from tests.planner.tiling.adapted_step import adapted_model
from tests.planner.tiling.language_step import language_batch, language_loss, language_model, language_step


@pytest.mark.long
def test_the_recorded_step_stays_a_rival_of_its_halves(
    monkeypatch: pytest.MonkeyPatch, split: tuple[make_bundle.CapturedJob, MeasuredCosts, TiledJob]
) -> None:
    monkeypatch.setattr(ways_to_cut, "first_tilings", lambda *_: [])
    captured, measured, presplit = split
    recorded = TiledJob(captured, measured, ())

    def costing(seconds: float) -> TiledJob:
        tables = tuple(tuple(OpCost(seconds, 0, seconds) for _ in ops) for ops in presplit.measured.ops)
        return replace(presplit, measured=replace(presplit.measured, ops=tables))

    cheap, expensive = costing(1e-6), costing(1e-2)
    graph = captured.graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    tight = floor_of(graph, CostTable(device, measured.ops[0])).nbytes + 1000
    assert chosen(recorded, expensive, device, tight) is recorded
    assert chosen(recorded, cheap, device, tight) is cheap

    def overruling(graph: StepGraph, costs: CostTable, ram_bytes: int) -> PlanResult:
        found = GREEDY(graph, costs, ram_bytes)
        return found if graph == captured.graphs["step"] else replace(found, plan=None)

    def joules(tiled: TiledJob) -> float:
        found = cost_of_plan(tiled, device, tight, GREEDY)
        assert found is not None
        return found.joules

    least, most = 1e-6, 1e-2
    for _ in range(30):
        middle = (least + most) / 2
        least, most = (middle, most) if joules(costing(middle)) < 0.98 * joules(recorded) else (least, middle)
    near = costing(least)
    assert chosen(recorded, near, device, tight) is near
    assert chosen(recorded, near, device, tight, overruling) is recorded
    assert chosen(recorded, cheap, device, tight, overruling) is cheap, "so far apart that quick plans decide"
    assert chosen(recorded, cheap, device, 1) is cheap, "where nothing fits, what needs less says how much"


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_chains_run_in_tiles_where_that_is_cheaper_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)
    model = language_model()
    made = make_bundle.prepare(
        TrainingJob(
            model,
            language_loss,
            OPTIMIZERS["adamw"](model.parameters()),
            [torch.cat(columns) for columns in zip(language_batch(0), language_batch(1), strict=True)],
            8,
        )
    )
    graph = made.graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    measured = MeasuredCosts((costs_of(graph).ops,), 0, 0)
    recorded, presplit = TiledJob(made, measured, ()), with_split_gradients(made, measured, ROOM, 2.0, lambda *_: None)
    assert chosen(recorded, presplit, device, 1 << 40) is recorded
    least = floor_of(graph, CostTable(device, presplit.measured.ops[0])).nbytes
    tight = chosen(recorded, presplit, device, least - (1 << 17))
    assert tight.tiled_chains and tight.left_whole == ()
    assert floor_of(tight.captured.graphs["step"], CostTable(device, tight.measured.ops[0])).nbytes < least
    odd = tuple(Difference(Replacement((i,), (), "all"), "differs") for i in range(len(graph.ops)))
    monkeypatch.setattr(comparing, "compared", lambda pairs, _: (odd,) * len(pairs))
    assert chosen(recorded, presplit, device, least).tiled_chains == ()


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_below_the_floor_of_the_whole_weight_blocks_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = make_bundle.prepare(adapted_job(adapted_model(), rows=1))
    graph = captured.graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    recorded = TiledJob(captured, MeasuredCosts(tuple(costs_of(g).ops for g in captured.graphs.values()), 0, 0), ())
    weight = next(s.nbytes for s in graph.storages if s.name == "embed.weight")
    budget = (1 << 20) + weight
    found = chosen(recorded, recorded, device, budget)
    assert found.captured.blocks and found.left_whole == ()
    assert floor_of(found.captured.graphs["step"], CostTable(device, found.measured.ops[0])).nbytes <= budget
    assert floor_of(graph, CostTable(device, recorded.measured.ops[0])).nbytes > budget


@pytest.mark.slow
def test_where_no_plan_fits_without_blocks_that_differ_here_the_job_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = make_bundle.prepare(adapted_job(adapted_model(), rows=1))
    device = costs_of(captured.graphs["step"], base=1 << 20).device
    recorded = TiledJob(captured, MeasuredCosts(tuple(costs_of(g).ops for g in captured.graphs.values()), 0, 0), ())
    monkeypatch.setattr(
        comparing,
        "compared",
        lambda pairs, _: tuple(tuple(Difference(r, "row 3 differs") for r in n.replacements) for _, n in pairs),
    )
    found = chosen(recorded, recorded, device, (1 << 20) + (1 << 12))
    assert not found.captured.blocks and any("blocks: row 3 differs" in reason for reason in found.left_whole)


@pytest.mark.long
@pytest.mark.parametrize("spare_bytes", [0, 1_500_000])
def test_each_kind_of_chain_is_a_choice_and_the_chosen_is_nearly_the_best(
    spare_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)
    monkeypatch.setattr(ways_to_cut, "first_tilings", lambda *_: [(280_000, 4)])
    monkeypatch.setattr(comparing, "compared", lambda pairs, _: ((),) * len(pairs))
    monkeypatch.setattr(
        comparing,
        "with_operator_costs",
        lambda made, *_: [
            replace(s, measured=MeasuredCosts((ops_by_bytes(s.captured.graphs["step"]),), 0, 0)) for s in made
        ],
    )
    graph = language_step().graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    recorded = TiledJob(replace(whole()[0], graphs={"step": graph}), MeasuredCosts((ops_by_bytes(graph),), 0, 0), ())
    ram_bytes = floor_of(graph, CostTable(device, recorded.measured.ops[0])).nbytes + spare_bytes

    def joules(tiling: Tiling) -> float:
        new = tiling.applied(graph).graph
        costs = CostTable(device, ops_by_bytes(new))
        plan = GREEDY(new, costs, ram_bytes).plan
        return math.inf if plan is None else lower(new, costs, plan).cost_joules

    uniform = tile_fat(graph, 280_000, 4)
    alike = kinds(graph, uniform.applied(graph))
    every = []
    for counts in itertools.product((1, 4, 8), repeat=len(alike)):
        tiling = uniform
        for ops, n in zip(alike, counts, strict=True):
            tiling = tiling.changed(ops, n)
        every.append(joules(tiling))
    found = chosen(recorded, recorded, device, ram_bytes)
    assert len(alike) == 3
    assert joules(found.tilings.get("step", Tiling(()))) <= 1.1 * min(every)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quick", "planned", "chosen_one", "ran"),
    [
        ({"a": 1.00, "b": 1.04}, {"a": 1.00, "b": 0.90}, "a", ["a"]),
        ({"a": 1.00, "b": 1.005}, {"a": 1.00, "b": 0.90}, "b", ["a", "b"]),
        ({"a": 1.00, "b": 1.04}, {"a": 0.98, "b": 0.97}, "a", ["a"]),
        ({"a": 1.00, "b": 1.02}, {"a": 0.97, "b": 0.95}, "b", ["a", "b"]),
        ({"a": 1.00, "b": 1.04}, {"b": 1.03}, "b", ["a", "b"]),
        ({"b": 1.04, "a": 1.00}, {}, "a", ["a", "b"]),
        ({"b": 1.06, "a": 1.00}, {"a": 1.00, "b": 0.90}, "a", []),
    ],
)
def test_ways_are_planned_properly_for_as_long_as_one_may_win(
    quick: dict[str, float], planned: dict[str, float], chosen_one: str, ran: list[str]
) -> None:
    captured, measured = whole()
    candidates = {name: TiledJob(captured, measured, (name,)) for name in quick}
    asked: list[str] = []

    def plan(tiled: TiledJob) -> PlanCost | None:
        (name,) = tiled.left_whole
        asked.append(name)
        return PlanCost(tiled, planned[name], False) if name in planned else None

    found = best_candidate([PlanCost(candidates[name], joules, False) for name, joules in quick.items()], plan)
    assert (found.sliced.left_whole, asked) == ((chosen_one,), ran)


@pytest.mark.slow
@pytest.mark.parametrize(("found", "bases"), [(30, [20, 30]), (20, [20]), (None, [20])])
def test_tiles_are_chosen_again_where_a_trial_found_more_beside_the_step(found: int | None, bases: list[int]) -> None:
    device, seen = costs_of(whole()[0].graphs["step"]).device, list[int]()

    def make(device: DeviceCosts, is_last: bool) -> str:
        assert is_last == bool(seen)
        seen.append(device.base_bytes)
        if len(seen) == 2:
            return "made"
        error = make_bundle.InfeasibleError("no plan fits", None)
        error.base_bytes = found
        raise error

    if len(bases) == 2:
        assert again_with_base(make, replace(device, base_bytes=20)) == "made"
    else:
        with pytest.raises(make_bundle.InfeasibleError):
            again_with_base(make, replace(device, base_bytes=20))
    assert seen == bases
