"""A job's graphs in pieces: compared in a process of its own, what differs left whole and named, costs measured anew."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from agent.federate.tensors import federated_tensors
from agent.prepare import slices
from agent.prepare.bench.bench import Bench
from agent.prepare.bundle import TrialError, trial
from agent.prepare.frozen_weights import files as weight_files
from agent.prepare.frozen_weights.files import with_weight_files
from agent.prepare.reference import with_reference
from agent.prepare.slices import (
    ComparingRoom,
    Sliced,
    again_with_base,
    compared,
    in_blocks,
    in_channels,
    in_halves,
    in_pieces,
    with_products,
)
from agent.train.result import trained_bytes
from agent.train.trainer import Trainer, TrainOptions
from planner import make_bundle
from planner.ir.bundle.bundle import BLOCKS_FORMAT, NO_LIMITS, Bundle, BundleError
from planner.ir.costs import CostTable, DeviceCosts, OpCost
from planner.ir.graph import StepGraph
from planner.ir.lowering.lower import lower
from planner.job import TrainingJob
from planner.profiling.operators import Measured
from planner.search.floor import floor_of
from planner.search.plan_step import PlanResult
from planner.slices import pieces
from planner.slices.chains import touched_bytes
from planner.slices.choices import Cut, cut_fat, kinds
from planner.slices.comparison import Differing
from planner.slices.gradients import CONVOLUTION_BACKWARD, WHAT, split_gradients
from planner.slices.norms import NORM_BACKWARD
from planner.slices.pixels import PRODUCTS
from planner.slices.rewriting import Replacement, Rewritten, compacted
from tests.agent.exactness import OPTIMIZERS
from tests.agent.jobs_small import make_job
from tests.planner.bundles import rewrite
from tests.planner.slices.adapted_step import ROWS, adapted_batch, adapted_loss, adapted_model, trained
from tests.planner.slices.language_step import language_batch, language_loss, language_model, language_step
from tests.planner.slices.normed_step import normed, normed_batch, normed_loss
from tests.planner.slices.table_step import reader, reader_batch, reader_loss
from tests.planner.steps import costs_of

ROOM = ComparingRoom(1 << 30, Path("/var/tmp"), 1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def cached_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is made once for this module measures into a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def whole() -> tuple[make_bundle.Prepared, Measured]:
    made = make_bundle.prepare(make_job())
    tables = tuple(tuple(OpCost(1e-4, 0, 1e-4) for _ in graph.ops) for graph in made.graphs.values())
    return made, Measured(tables, 100, 10)


@pytest.fixture(scope="module")
def halves(cached_once: None) -> tuple[make_bundle.Prepared, Measured, Sliced]:
    """The job as recorded, what it was measured to take, and its convolutions' gradients in halves."""
    prepared, measured = whole()
    return prepared, measured, in_halves(prepared, measured, ROOM, 2.0, lambda *_: None)


def test_a_job_with_a_convolution_is_halved_and_measured_again(
    halves: tuple[make_bundle.Prepared, Measured, Sliced],
) -> None:
    prepared, _, sliced = halves
    assert sliced.left_whole == ()
    assert sliced.measured.base_bytes == 100
    for (name, graph), ops in zip(sliced.prepared.graphs.items(), sliced.measured.ops, strict=True):
        before = prepared.graphs[name]
        halved = sum(op.name == CONVOLUTION_BACKWARD and len(op.outputs) == 3 for op in before.ops)
        assert len(ops) == len(graph.ops) == len(before.ops) + halved
        assert halved == (0 if name.startswith("eval") else 1)
        assert all(cost.seconds > 0 for cost in ops)


def test_of_convolutions_of_single_pixels_those_are_products_that_cost_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.Tanh(), nn.Conv2d(8, 8, 1, bias=False), nn.Tanh())
    job = TrainingJob(
        model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), lr=0.1), [torch.randn(8, 3, 9, 9)], 4
    )
    made = make_bundle.prepare(job)
    (graph,) = made.graphs.values()
    first, *others = (i for i, op in enumerate(graph.ops) if op.name == "aten::convolution")

    def costs(made: dict[str, StepGraph], before: Measured, *_: Any) -> Measured:
        """Let the first be dear as products, the others cheap."""
        (ops,) = (one.ops for one in made.values())
        table = tuple(
            OpCost(1e-4, 7, 2e-4 if i == first else 0.5e-4) if op.name == PRODUCTS else OpCost(1e-4, 0, 1e-4)
            for i, op in enumerate(ops)
        )
        return replace(before, ops=(table,))

    monkeypatch.setattr(slices, "measured_again", costs)
    whole = Sliced(made, Measured((tuple(OpCost(1e-4, 0, 1e-4) for _ in graph.ops),), 5, 0), ("something",))
    found = with_products(whole, ROOM, 2.0, lambda *_: None)
    (chosen,) = found.prepared.graphs.values()
    products = [i for i, op in enumerate(chosen.ops) if op.name == PRODUCTS]
    assert others and products == others and found.left_whole == ("something",)
    assert [found.measured.ops[0][i].workspace_bytes for i in (first, *others)] == [0] + [7] * len(others)
    assert found.measured.base_bytes == 5


def test_what_differs_here_is_left_whole_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, measured = whole()

    def odd(pairs: list[tuple[StepGraph, Rewritten]], _: ComparingRoom) -> tuple[tuple[Differing, ...], ...]:
        return tuple(tuple(Differing(r, "the third byte differs") for r in new.replacements) for _, new in pairs)

    monkeypatch.setattr(slices, "compared", odd)
    sliced = in_halves(prepared, measured, ROOM, 2.0, lambda *_: None)
    assert sliced.prepared.graphs == prepared.graphs
    assert sliced.measured == measured
    assert {f"{WHAT}: the third byte differs", "relu in place: the third byte differs"} <= set(sliced.left_whole)


def test_a_comparison_that_ends_otherwise_is_an_error() -> None:
    graph = whole()[0].graphs["step"]
    rewritten = split_gradients(graph)
    damaged = replace(rewritten.graph, storages=rewritten.graph.storages[:-1])
    with pytest.raises(TrialError, match="comparing operators in pieces ended"):
        compared([(graph, replace(rewritten, graph=damaged))], ROOM)


GREEDY = make_bundle.default_planner(strategy="greedy", time_limit_s=5.0)


def chosen(
    recorded: Sliced, halved: Sliced, device: DeviceCosts, ram_bytes: int, planner: make_bundle.Planner = GREEDY
) -> Sliced:
    return in_pieces(recorded, halved, device, ram_bytes, ROOM, planner, lambda *_: None, NO_LIMITS)


def test_the_recorded_step_stays_a_rival_of_its_halves(
    monkeypatch: pytest.MonkeyPatch, halves: tuple[make_bundle.Prepared, Measured, Sliced]
) -> None:
    monkeypatch.setattr(slices, "first_cuts", lambda *_: [])
    prepared, measured, halved = halves
    recorded = Sliced(prepared, measured, ())

    def costing(seconds: float) -> Sliced:
        tables = tuple(tuple(OpCost(seconds, 0, seconds) for _ in ops) for ops in halved.measured.ops)
        return replace(halved, measured=replace(halved.measured, ops=tables))

    cheap, dear = costing(1e-6), costing(1e-2)
    graph = prepared.graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    tight = floor_of(graph, CostTable(device, measured.ops[0])).nbytes + 1000
    assert chosen(recorded, dear, device, tight) is recorded
    assert chosen(recorded, cheap, device, tight) is cheap

    def overruling(graph: StepGraph, costs: CostTable, ram_bytes: int) -> PlanResult:
        found = GREEDY(graph, costs, ram_bytes)
        return found if graph == prepared.graphs["step"] else replace(found, plan=None)

    def joules(sliced: Sliced) -> float:
        found = slices.cost_of_plan(sliced, device, tight, GREEDY)
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


def test_chains_run_in_pieces_where_that_is_cheaper_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SPLIT_BYTES", 50_000)
    made = make_bundle.prepare(
        TrainingJob(
            language_model(), language_loss, OPTIMIZERS["adamw"](language_model().parameters()),
            [torch.cat(columns) for columns in zip(language_batch(0), language_batch(1), strict=True)], 8,
        )
    )  # fmt: skip
    graph = made.graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    measured = Measured((costs_of(graph).ops,), 0, 0)
    recorded, halved = Sliced(made, measured, ()), in_halves(made, measured, ROOM, 2.0, lambda *_: None)
    assert chosen(recorded, halved, device, 1 << 40) is recorded
    least = floor_of(graph, CostTable(device, halved.measured.ops[0])).nbytes
    tight = chosen(recorded, halved, device, least - (1 << 17))
    assert tight.in_pieces and tight.left_whole == ()
    assert floor_of(tight.prepared.graphs["step"], CostTable(device, tight.measured.ops[0])).nbytes < least
    odd = tuple(Differing(Replacement((i,), (), "all"), "differs") for i in range(len(graph.ops)))
    monkeypatch.setattr(slices, "compared", lambda pairs, _: (odd,) * len(pairs))
    assert chosen(recorded, halved, device, least).in_pieces == ()


@pytest.mark.long
def test_near_the_floor_that_a_batch_norm_sets_its_backward_pass_runs_by_channels() -> None:
    model, columns = normed(), list(normed_batch(0))
    job = TrainingJob(model, normed_loss, OPTIMIZERS["sgd"](model.parameters()), columns, 4)
    prepared = make_bundle.prepare(job)
    prepared = replace(
        prepared, graphs={name: compacted(split_gradients(graph).graph) for name, graph in prepared.graphs.items()}
    )
    device = costs_of(prepared.graphs["step"], base=1 << 20).device
    halved = Sliced(prepared, Measured(tuple(costs_of(g).ops for g in prepared.graphs.values()), 0, 0), ())
    floor = floor_of(prepared.graphs["step"], CostTable(device, halved.measured.ops[0]))
    assert floor.name == NORM_BACKWARD
    (found,) = in_channels(halved, device, floor.nbytes, ROOM, lambda *_: None)
    assert found.left_whole == ()
    assert floor_of(found.prepared.graphs["step"], CostTable(device, found.measured.ops[0])).name != NORM_BACKWARD
    assert in_channels(halved, device, 2 * floor.nbytes, ROOM, lambda *_: None) == [], "with room, nothing is copied"


def adapted_job(model: torch.nn.Module, rows: int = ROWS) -> TrainingJob:
    columns = [torch.cat(c) for c in zip(adapted_batch(0), adapted_batch(1), strict=True)]
    return TrainingJob(model, adapted_loss, OPTIMIZERS["adamw"](trained(model)), columns, rows, eval_data=columns)


def in_tight_room(prepared: make_bundle.Prepared) -> tuple[Sliced, DeviceCosts, int]:
    """Return an adapted job for a budget of which its frozen embedding takes more than half."""
    device = costs_of(prepared.graphs["step"], base=1 << 20).device
    budget = (1 << 20) + 600_000
    (sliced,) = in_blocks(
        Sliced(prepared, Measured(tuple(costs_of(g).ops for g in prepared.graphs.values()), 0, 0), ()),
        device, budget, ROOM, lambda *_: None,
    )  # fmt: skip
    return sliced, device, budget


def written(prepared: make_bundle.Prepared, measured: Measured, device: DeviceCosts, out: Path) -> Bundle:
    plans, costs = make_bundle.plan_all(prepared, measured, device, 1 << 30, GREEDY)
    make_bundle.write(out, prepared, [plans], costs, [1 << 30], threads=1)
    return Bundle(out)


@pytest.fixture(scope="module")
def in_blocks_written(cached_once: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Sliced, Bundle]:
    """An adapted job whose frozen embedding is read in blocks, and its bundle."""
    sliced, device, _ = in_tight_room(with_reference(make_bundle.prepare(adapted_job(adapted_model())), 2))
    path = tmp_path_factory.mktemp("blocks") / "job.port"
    return sliced, written(sliced.prepared, sliced.measured, device, path)


def test_a_frozen_weight_larger_than_half_the_room_is_read_in_blocks_by_all_graphs(
    tmp_path: Path, in_blocks_written: tuple[Sliced, Bundle]
) -> None:
    sliced, bundle = in_blocks_written
    assert sliced.left_whole == ()
    blocks = sliced.prepared.blocks["parameter/embed.weight"]
    assert len(blocks.rows) == len(blocks.columns) == 6
    for graph in sliced.prepared.graphs.values():
        names = {storage.name for storage in graph.storages}
        assert "embed.weight" not in names and "embed.weight#rows/5" in names
    assert bundle.manifest.format == BLOCKS_FORMAT
    assert "parameter/embed.weight" in bundle.manifest.reference.checksums, "compared as the whole"
    trial(bundle.path, (tmp_path,), 1, compared=2)


def test_the_result_has_the_weight_whole_and_a_run_begins_with_it(
    tmp_path: Path, in_blocks_written: tuple[Sliced, Bundle]
) -> None:
    _, bundle = in_blocks_written
    started = Trainer(bundle, TrainOptions(tmp_path / "state", tmp_path))
    started.start()
    started.save_weights(tmp_path / "result.safetensors")
    started.close()
    found = load_file(tmp_path / "result.safetensors")
    model = adapted_model()
    assert found.keys() == {"embed.weight", *(n for n, _ in model.named_parameters())} - {"head.weight"}
    assert torch.equal(found["embed.weight"], model.embed.weight)
    found["embed.weight"] = torch.arange(float(found["embed.weight"].numel())).view_as(found["embed.weight"])
    save_file(found, tmp_path / "other.safetensors")
    given = Trainer(bundle, TrainOptions(tmp_path / "other", tmp_path, weights=tmp_path / "other.safetensors"))
    given.start()
    blocks = bundle.manifest.blocks["parameter/embed.weight"]
    rows, columns = ([given.persistents.tensor(key).clone() for key in keys] for keys in (blocks.rows, blocks.columns))
    given.close()
    assert torch.equal(torch.cat(rows), found["embed.weight"])
    assert torch.equal(torch.cat(columns, 1), found["embed.weight"])


def test_rows_stay_in_the_file_of_the_user_and_columns_go_into_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "LEAST_BYTES", 1 << 14)
    save_file(adapted_model().embed.state_dict(), tmp_path / "base.safetensors")
    model = adapted_model()
    model.embed.load_state_dict(load_file(tmp_path / "base.safetensors"), assign=True)
    model.embed.weight.requires_grad_(False)
    model.head.weight = model.embed.weight
    sliced, device, _ = in_tight_room(make_bundle.prepare(adapted_job(model)))
    prepared = with_weight_files(sliced.prepared)
    blocks = prepared.blocks["parameter/embed.weight"]
    assert set(prepared.files) == set(blocks.rows)
    bundle = written(prepared, sliced.measured, device, tmp_path / "job.port")
    for k, keys in enumerate((blocks.rows, blocks.columns)):
        parts = [b"".join(bundle.contents(key, 1 << 16)) for key in keys]
        layouts = [bundle.manifest.layouts[key].shape for key in keys]
        tensors = [
            torch.frombuffer(bytearray(p), dtype=torch.float32).view(s) for p, s in zip(parts, layouts, strict=True)
        ]
        assert torch.equal(torch.cat(tensors, k), model.embed.weight)
    assert "unused/embed.weight" not in bundle.tensors


def test_a_trained_table_in_rows_trains_checks_and_is_averaged_as_the_whole(tmp_path: Path) -> None:
    model = reader()
    columns = [torch.cat(c) for c in zip(*(reader_batch(i) for i in range(3)), strict=True)]
    job = TrainingJob(
        model, reader_loss, OPTIMIZERS["adamw"](model.parameters()), columns, ROWS, eval_data=[c[:6] for c in columns]
    )
    sliced, device, _ = in_tight_room(with_reference(make_bundle.prepare(job), 2))
    keys = {"parameter/table.weight", "state/table.weight/exp_avg", "state/table.weight/exp_avg_sq"}
    assert set(sliced.prepared.blocks) == keys
    bundle = written(sliced.prepared, sliced.measured, device, tmp_path / "job.port")
    assert keys <= bundle.manifest.reference.checksums.keys()
    trial(bundle.path, (tmp_path,), 1, compared=2)
    tensors = federated_tensors(bundle.path)
    assert set(tensors.layouts) == {"table.weight", "out.weight", "out.bias"}
    assert np.array_equal(tensors.initial()["table.weight"], reader().table.weight.detach().numpy())
    assert trained_bytes(bundle) == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.long
def test_a_trained_embedding_that_is_the_head_too_trains_as_plain_pytorch_and_is_whole_in_the_result(
    tmp_path: Path,
) -> None:
    model = adapted_model().requires_grad_(True)
    prepared = with_reference(make_bundle.prepare(adapted_job(model, rows=3)), 2)
    assert len(prepared.graphs) > 2, "the rest of the data, and the evaluation"
    sliced, device, _ = in_tight_room(prepared)
    assert sliced.left_whole == () and not sliced.prepared.blocks["parameter/embed.weight"].columns
    whole, graph = prepared.graphs["step"], sliced.prepared.graphs["step"]
    assert not any(s.name == "embed.weight" for s in graph.storages) and len(graph.ops) > len(whole.ops)
    bundle = written(sliced.prepared, sliced.measured, device, tmp_path / "job.port")
    assert "state/embed.weight/exp_avg" in bundle.manifest.reference.checksums
    trial(bundle.path, (tmp_path,), 1, compared=2)


def test_a_bundle_whose_blocks_do_not_make_up_the_weight_is_refused(
    tmp_path: Path, in_blocks_written: tuple[Sliced, Bundle]
) -> None:

    def without_last(manifest: dict[str, Any]) -> dict[str, Any]:
        manifest["blocks"]["parameter/embed.weight"]["rows"].pop()
        return manifest

    rewrite(in_blocks_written[1].path, tmp_path / "other.port", {"manifest.json": without_last})
    with pytest.raises(BundleError, match=r"the blocks of parameter/embed\.weight do not make it up"):
        Bundle(tmp_path / "other.port")


def test_blocks_that_differ_here_leave_the_weight_whole_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = make_bundle.prepare(adapted_job(adapted_model()))

    def odd(pairs: list[tuple[StepGraph, Rewritten]], _: ComparingRoom) -> tuple[tuple[Differing, ...], ...]:
        return tuple(tuple(Differing(r, "the third byte differs") for r in new.replacements[:1]) for _, new in pairs)

    monkeypatch.setattr(slices, "compared", odd)
    device = costs_of(prepared.graphs["step"], base=1 << 20).device
    recorded = Sliced(prepared, Measured((), 0, 0), ())
    assert in_blocks(recorded, device, (1 << 20) + 600_000, ROOM, lambda *_: None) == []


def test_below_the_floor_of_the_whole_weight_blocks_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = make_bundle.prepare(adapted_job(adapted_model(), rows=1))
    graph = prepared.graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    recorded = Sliced(prepared, Measured(tuple(costs_of(g).ops for g in prepared.graphs.values()), 0, 0), ())
    weight = next(s.nbytes for s in graph.storages if s.name == "embed.weight")
    budget = (1 << 20) + weight
    found = chosen(recorded, recorded, device, budget)
    assert found.prepared.blocks and found.left_whole == ()
    assert floor_of(found.prepared.graphs["step"], CostTable(device, found.measured.ops[0])).nbytes <= budget
    assert floor_of(graph, CostTable(device, recorded.measured.ops[0])).nbytes > budget


def ops_by_bytes(graph: StepGraph) -> tuple[OpCost, ...]:
    """Return costs by what operators touch, and something for each call."""
    seconds = [1e-5 + touched_bytes(graph, i) / 2e9 for i in range(len(graph.ops))]
    return tuple(OpCost(s, 0, s) for s in seconds)


@pytest.mark.parametrize("spare_bytes", [0, pytest.param(1_500_000, marks=pytest.mark.long)])
def test_each_kind_of_chain_is_a_choice_and_the_chosen_is_nearly_the_best(
    spare_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "SPLIT_BYTES", 50_000)
    monkeypatch.setattr(slices, "first_cuts", lambda *_: [(280_000, 4)])
    monkeypatch.setattr(slices, "compared", lambda pairs, _: ((),) * len(pairs))
    monkeypatch.setattr(
        slices, "_measured",
        lambda made, *_: [replace(s, measured=Measured((ops_by_bytes(s.prepared.graphs["step"]),), 0, 0)) for s in made],
    )  # fmt: skip
    graph = language_step().graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    recorded = Sliced(replace(whole()[0], graphs={"step": graph}), Measured((ops_by_bytes(graph),), 0, 0), ())
    ram_bytes = floor_of(graph, CostTable(device, recorded.measured.ops[0])).nbytes + spare_bytes

    def joules(cut: Cut) -> float:
        new = cut.applied(graph).graph
        costs = CostTable(device, ops_by_bytes(new))
        plan = GREEDY(new, costs, ram_bytes).plan
        return math.inf if plan is None else lower(new, costs, plan).cost_joules

    uniform = cut_fat(graph, 280_000, 4)
    alike = kinds(graph, uniform.applied(graph))
    every = []
    for counts in itertools.product((1, 4, 8), repeat=len(alike)):
        cut = uniform
        for ops, n in zip(alike, counts, strict=True):
            cut = cut.changed(ops, n)
        every.append(joules(cut))
    found = chosen(recorded, recorded, device, ram_bytes)
    assert len(alike) == 3
    assert joules(found.cuts.get("step", Cut(()))) <= 1.1 * min(every)


def test_a_change_is_planned_once_and_not_where_it_takes_no_less_of_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SPLIT_BYTES", 50_000)
    graph = language_step().graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    recorded = Sliced(replace(whole()[0], graphs={"step": graph}), Measured((ops_by_bytes(graph),), 0, 0), ())
    ram_bytes = floor_of(graph, CostTable(device, recorded.measured.ops[0])).nbytes + (1 << 19)
    planned = list[int]()

    def quick(graph: StepGraph, costs: CostTable, ram_bytes: int) -> PlanResult:
        planned.append(len(graph.ops))
        return GREEDY(graph, costs, ram_bytes)

    ways = slices._Ways(recorded, recorded, device, ram_bytes, ROOM, quick, lambda *_: None, 60.0, math.inf)
    uniform = cut_fat(graph, 280_000, 4)
    start, finer = {"step": uniform}, {"step": uniform.changed(range(len(graph.ops)), 8)}
    assert ways._better([start], start, 4) == []
    assert planned == []
    found = ways._better([start, finer], start, 4)
    assert planned == [len(way["step"].applied(graph).graph.ops) for way in (start, finer)]
    assert ways._better([finer], start, 4) == found
    assert len(planned) == 2


def test_a_graph_of_many_times_the_operators_is_measured_only_where_no_shorter_one_has_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "SPLIT_BYTES", 50_000)
    monkeypatch.setattr(slices, "first_cuts", lambda *_: [(280_000, 2), (280_000, 8)])
    monkeypatch.setattr(slices, "compared", lambda pairs, _: ((),) * len(pairs))
    graph = language_step().graphs["step"]
    few, many = (len(cut_fat(graph, 280_000, n).applied(graph).graph.ops) for n in (2, 8))
    monkeypatch.setattr(slices, "MANY_TIMES", (few + many) / 2 / len(graph.ops))
    measured = set[int]()

    def counted(made: list[Sliced], *_: Any) -> list[Sliced]:
        measured.update(len(sliced.prepared.graphs["step"].ops) for sliced in made)
        tables = [ops_by_bytes(sliced.prepared.graphs["step"]) for sliced in made]
        return [replace(s, measured=Measured((ops,), 0, 0)) for s, ops in zip(made, tables, strict=True)]

    monkeypatch.setattr(slices, "_measured", counted)
    monkeypatch.setattr(slices._Ways, "plan_changes", lambda *_: None)
    device = costs_of(graph, base=1 << 20).device
    recorded = Sliced(replace(whole()[0], graphs={"step": graph}), Measured((ops_by_bytes(graph),), 0, 0), ())
    floor = floor_of(graph, CostTable(device, recorded.measured.ops[0])).nbytes
    chosen(recorded, recorded, device, floor + (1 << 18))
    assert measured and max(measured) < (few + many) / 2
    measured.clear()
    finest = cut_fat(graph, 280_000, 8).applied(graph).graph
    floor = floor_of(finest, CostTable(device, ops_by_bytes(finest))).nbytes
    chosen(recorded, recorded, device, floor)
    assert max(measured) > (few + many) / 2, "two pieces do not fit, eight do"


@pytest.mark.parametrize(
    ("joint", "cheap", "tried"),
    [(1, True, []), (2, True, [2]), (2, False, [2, 4])],
    ids=["it leaves all whole", "it cuts", "its cut costs more than promised"],
)
def test_what_the_joint_model_cuts_is_tried_and_the_rest_only_where_that_failed(
    joint: int, cheap: bool, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "SPLIT_BYTES", 50_000)
    monkeypatch.setattr(slices, "first_cuts", lambda *_: [(280_000, 4)])
    monkeypatch.setattr(slices, "compared", lambda pairs, _: ((),) * len(pairs))
    monkeypatch.setattr(slices, "joint_cut", lambda graph, costs, ram_bytes, cut, limit_s: cut.changed_all(joint))
    graph = language_step().graphs["step"]
    lengths = {len(cut_fat(graph, 280_000, n).applied(graph).graph.ops): n for n in (2, 4)}
    measured = list[int]()

    def counted(made: list[Sliced], *_: Any) -> list[Sliced]:
        graphs = [sliced.prepared.graphs["step"] for sliced in made]
        measured.extend(lengths[len(made.ops)] for made in graphs)
        factor = 1 if cheap else 10
        tables = [tuple(replace(op, joules=factor * op.joules) for op in ops_by_bytes(made)) for made in graphs]
        return [replace(s, measured=Measured((ops,), 0, 0)) for s, ops in zip(made, tables, strict=True)]

    monkeypatch.setattr(slices, "_measured", counted)
    monkeypatch.setattr(slices._Ways, "plan_changes", lambda *_: None)
    device = costs_of(graph, base=1 << 20).device
    recorded = Sliced(replace(whole()[0], graphs={"step": graph}), Measured((ops_by_bytes(graph),), 0, 0), ())
    floor = floor_of(graph, CostTable(device, recorded.measured.ops[0])).nbytes
    chosen(recorded, recorded, device, floor + (1 << 16))
    assert measured == tried


def test_what_does_not_fit_whatever_its_kernels_take_is_not_compared_and_the_least_floor_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "SPLIT_BYTES", 50_000)
    monkeypatch.setattr(slices, "first_cuts", lambda *_: [(280_000, 2), (280_000, 8)])
    monkeypatch.setattr(slices, "in_blocks", lambda *_: [])
    asked = list[int]()
    monkeypatch.setattr(slices, "compared", lambda pairs, _: asked.append(len(pairs)) or ((),) * len(pairs))
    graph = language_step().graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    recorded = Sliced(replace(whole()[0], graphs={"step": graph}), Measured((ops_by_bytes(graph),), 0, 0), ())
    uncut, finest = (
        floor_of(made, CostTable(device, tuple(OpCost(1e-4, 0, 1e-4) for _ in made.ops))).nbytes
        for made in (graph, cut_fat(graph, 280_000, 8).applied(graph).graph)
    )
    quick = make_bundle.default_planner(strategy="greedy", time_limit_s=1.0)
    ways = slices._Ways(recorded, recorded, device, finest - 1, ROOM, quick, lambda *_: None, 60.0, math.inf)
    ways.plan_starts()
    assert (sum(asked), ways.best) == (0, None)
    found = slices.cost_of_plan(ways.finest, device, finest - 1, quick)
    told = floor_of(*slices._main(ways.finest, device)).nbytes
    assert found is None and finest <= told < uncut


def test_graphs_are_compared_in_one_process_each_by_itself() -> None:
    graph = whole()[0].graphs["step"]
    rewritten = split_gradients(graph)
    assert rewritten.replacements
    nothing = Rewritten(graph, ())
    assert compared([(graph, nothing), (graph, rewritten), (graph, nothing)], ROOM) == ((), (), ())
    assert compared([(graph, nothing)], ROOM) == ((),)


def test_what_was_compared_is_known_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = whole()[0].graphs["step"]
    rewritten = split_gradients(graph)
    ran: list[int] = []

    def odd(_: Bench, pairs: list[tuple[StepGraph, Rewritten]], *__: object) -> tuple[tuple[Differing, ...], ...]:
        ran.append(sum(len(new.replacements) for _, new in pairs))
        return tuple(tuple(Differing(r, "the third byte differs") for r in new.replacements) for _, new in pairs)

    monkeypatch.setattr(Bench, "compare", odd)
    first = compared([(graph, rewritten)], ROOM)
    assert {d.where for d in first[0]} == {"the third byte differs"} and len(first[0]) == len(rewritten.replacements)
    assert compared([(graph, rewritten)], ROOM) == first
    assert ran == [len(rewritten.replacements)]
    compared([(graph, rewritten)], replace(ROOM, threads=2))
    assert len(ran) == 2, "another number of threads is another machine"


def test_ways_that_are_near_are_worked_on_whatever_measuring_them_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing and measuring them had used up the time, and what came of it was thrown away."""
    monkeypatch.setattr(pieces, "SPLIT_BYTES", 50_000)
    cuts_nothing = (1 << 40, 4)
    monkeypatch.setattr(slices, "first_cuts", lambda *_: [cuts_nothing, (280_000, 4)])
    monkeypatch.setattr(slices, "MOST_STARTS", 1)
    monkeypatch.setattr(slices, "compared", lambda pairs, _: ((),) * len(pairs))
    clock, measured = [0.0], list[int]()

    def slowly(made: list[Sliced], *_: Any) -> list[Sliced]:
        clock[0] += 10 * slices.LEAST_SEARCH_S
        measured.append(len(made))
        tables = [ops_by_bytes(sliced.prepared.graphs["step"]) for sliced in made]
        return [replace(s, measured=Measured((ops,), 0, 0)) for s, ops in zip(made, tables, strict=True)]

    monkeypatch.setattr(slices, "_measured", slowly)
    monkeypatch.setattr(slices, "_cpu_s", lambda: clock[0])
    graph = language_step().graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    recorded = Sliced(replace(whole()[0], graphs={"step": graph}), Measured((ops_by_bytes(graph),), 0, 0), ())
    floor = floor_of(graph, CostTable(device, recorded.measured.ops[0])).nbytes
    assert chosen(recorded, recorded, device, floor + (1 << 18)).in_pieces
    assert len(measured) > 1 and all(measured), "the cut of the joint model, not one of nothing; then changes of it"


def test_each_way_of_cutting_keeps_the_costs_of_its_own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    made, measured = whole()
    graphs = made.graphs
    sliced = [slices.Sliced(made, measured, ()), slices.Sliced(made, measured, ())]
    counted = [
        [OpCost(float(place), 0, 0.0)] * len(g.ops) for place, g in enumerate((*graphs.values(), *graphs.values()))
    ]
    monkeypatch.setattr(Bench, "measure", lambda *_, **__: Measured(tuple(map(tuple, counted)), 0, 0))
    first, second = slices._measured(sliced, ROOM, 2.0, lambda *_: None)
    assert [table[0].seconds for table in first.measured.ops] == [*range(len(graphs))]
    assert [table[0].seconds for table in second.measured.ops] == [*range(len(graphs), 2 * len(graphs))]
    assert first.measured.base_bytes == measured.base_bytes


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
    prepared, measured = whole()
    ways = {name: Sliced(prepared, measured, (name,)) for name in quick}
    asked: list[str] = []

    def plan(sliced: Sliced) -> slices.PlanCost | None:
        (name,) = sliced.left_whole
        asked.append(name)
        return slices.PlanCost(sliced, planned[name], False) if name in planned else None

    found = slices._cheapest([slices.PlanCost(ways[name], joules, False) for name, joules in quick.items()], plan)
    assert (found.sliced.left_whole, asked) == ((chosen_one,), ran)


@pytest.mark.parametrize(("found", "bases"), [(30, [20, 30]), (20, [20]), (None, [20])])
def test_pieces_are_chosen_again_where_a_trial_found_more_beside_the_step(found: int | None, bases: list[int]) -> None:
    device, seen = costs_of(whole()[0].graphs["step"]).device, list[int]()

    def make(device: DeviceCosts) -> str:
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
