"""Weights read in blocks: bundles, results and checks have them whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from port_agent.federate.tensors import federated_tensors
from port_agent.prepare.frozen_weights import files as weight_files
from port_agent.prepare.frozen_weights.files import with_weight_files
from port_agent.prepare.measurement.dry_run import DryRunWorkers
from port_agent.prepare.reference import with_expected_results
from port_agent.prepare.tiling import comparing
from port_agent.prepare.tiling.tiled_job import ComparisonLimits, TiledJob
from port_agent.prepare.tiling.weight_blocks import in_blocks
from port_agent.training.comparison import tensor_checksum
from port_agent.training.result import trained_bytes
from port_agent.training.trainer import Trainer
from port_planner import make_bundle
from port_planner.exactness.replacements import Difference
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import BLOCKS_FORMAT, BundleError
from port_planner.ir.costs import DeviceCosts
from port_planner.ir.graph import StepGraph
from port_planner.job import TrainingJob
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.tiling.rewriting import RewrittenGraph
from tests.agent.exactness import OPTIMIZERS
from tests.agent.prepare.tiling.small_jobs import GREEDY, ROOM, adapted_job
from tests.agent.training.options import train_options
from tests.planner.bundles import rewrite
from tests.planner.steps import costs_of
from tests.planner.tiling.adapted_step import ROWS, adapted_model
from tests.planner.tiling.table_step import reader, reader_batch, reader_loss


def in_tight_room(captured: make_bundle.CapturedJob) -> tuple[TiledJob, DeviceCosts, int]:
    """Return an adapted job for a budget of which its frozen embedding takes more than half."""
    device = costs_of(captured.graphs["step"], base=1 << 20).device
    budget = (1 << 20) + 600_000
    tiled = in_blocks(
        TiledJob(captured, MeasuredCosts(tuple(costs_of(g).ops for g in captured.graphs.values()), 0, 0), ()),
        device,
        budget,
        ROOM,
        lambda *_: None,
    )
    return tiled, device, budget


def written(captured: make_bundle.CapturedJob, measured: MeasuredCosts, device: DeviceCosts, out: Path) -> Bundle:
    plans, costs = make_bundle.plan_all(captured, measured, device, 1 << 30, GREEDY)
    make_bundle.write(out, captured, [plans], costs, [1 << 30], threads=1)
    return Bundle(out)


@pytest.fixture(scope="module")
def in_blocks_written(cached_once: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[TiledJob, Bundle]:
    """An adapted job whose frozen embedding is read in blocks, and its bundle."""
    tiled, device, _ = in_tight_room(with_expected_results(make_bundle.prepare(adapted_job(adapted_model())), 2))
    path = tmp_path_factory.mktemp("blocks") / "job.port"
    return tiled, written(tiled.captured, tiled.measured, device, path)


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_a_frozen_weight_larger_than_half_the_room_is_read_in_blocks_by_all_graphs(
    tmp_path: Path, in_blocks_written: tuple[TiledJob, Bundle]
) -> None:
    tiled, bundle = in_blocks_written
    assert tiled.left_whole == ()
    blocks = tiled.captured.blocks["parameter/embed.weight"]
    assert len(blocks.rows) == len(blocks.columns) == 6
    for graph in tiled.captured.graphs.values():
        names = {storage.name for storage in graph.storages}
        assert "embed.weight" not in names and "embed.weight#rows/5" in names
    assert bundle.manifest.format == BLOCKS_FORMAT
    assert "parameter/embed.weight" in bundle.manifest.reference.checksums, "compared as the whole"
    DryRunWorkers(1).dry_run(bundle.path, (tmp_path,), compared=2)


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_the_result_has_the_weight_whole_and_a_run_begins_with_it(
    tmp_path: Path, in_blocks_written: tuple[TiledJob, Bundle]
) -> None:
    _, bundle = in_blocks_written
    started = Trainer(bundle, train_options(tmp_path / "state", tmp_path))
    started.start()
    started.save_weights(tmp_path / "result.safetensors")
    started.close()
    found = load_file(tmp_path / "result.safetensors")
    model = adapted_model()
    assert bundle.checksum("parameter/embed.weight") == tensor_checksum(model.embed.weight.detach())
    assert found.keys() == {"embed.weight", *(n for n, _ in model.named_parameters())} - {"head.weight"}
    assert torch.equal(found["embed.weight"], model.embed.weight)
    found["embed.weight"] = torch.arange(float(found["embed.weight"].numel())).view_as(found["embed.weight"])
    save_file(found, tmp_path / "other.safetensors")
    given = Trainer(bundle, train_options(tmp_path / "other", tmp_path, weights=tmp_path / "other.safetensors"))
    given.start()
    blocks = bundle.manifest.blocks["parameter/embed.weight"]
    rows, columns = ([given.persistents.tensor(key).clone() for key in keys] for keys in (blocks.rows, blocks.columns))
    given.close()
    assert torch.equal(torch.cat(rows), found["embed.weight"])
    assert torch.equal(torch.cat(columns, 1), found["embed.weight"])


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_rows_stay_in_the_file_of_the_user_and_columns_go_into_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "MIN_BYTES", 1 << 14)
    save_file(adapted_model().embed.state_dict(), tmp_path / "base.safetensors")
    model = adapted_model()
    model.embed.load_state_dict(load_file(tmp_path / "base.safetensors"), assign=True)
    model.embed.weight.requires_grad_(False)
    model.head.weight = model.embed.weight
    tiled, device, _ = in_tight_room(make_bundle.prepare(adapted_job(model)))
    captured = with_weight_files(tiled.captured)
    blocks = captured.blocks["parameter/embed.weight"]
    assert set(captured.files) == set(blocks.rows)
    bundle = written(captured, tiled.measured, device, tmp_path / "job.port")
    for k, keys in enumerate((blocks.rows, blocks.columns)):
        parts = [b"".join(bundle.contents(key, 1 << 16)) for key in keys]
        layouts = [bundle.manifest.layouts[key].shape for key in keys]
        tensors = [
            torch.frombuffer(bytearray(p), dtype=torch.float32).view(s) for p, s in zip(parts, layouts, strict=True)
        ]
        assert torch.equal(torch.cat(tensors, k), model.embed.weight)
    assert "unused/embed.weight" not in bundle.tensors
    assert bundle.checksum("parameter/embed.weight") == tensor_checksum(model.embed.weight.detach())


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_a_trained_table_in_rows_trains_checks_and_is_averaged_as_the_whole(tmp_path: Path) -> None:
    model = reader()
    columns = [torch.cat(c) for c in zip(*(reader_batch(i) for i in range(3)), strict=True)]
    job = TrainingJob(
        model, reader_loss, OPTIMIZERS["adamw"](model.parameters()), columns, ROWS, eval_data=[c[:6] for c in columns]
    )
    tiled, device, _ = in_tight_room(with_expected_results(make_bundle.prepare(job), 2))
    keys = {"parameter/table.weight", "state/table.weight/exp_avg", "state/table.weight/exp_avg_sq"}
    assert set(tiled.captured.blocks) == keys
    bundle = written(tiled.captured, tiled.measured, device, tmp_path / "job.port")
    assert keys <= bundle.manifest.reference.checksums.keys()
    DryRunWorkers(1).dry_run(bundle.path, (tmp_path,), compared=2)
    tensors = federated_tensors(bundle.path)
    assert set(tensors.layouts) == {"table.weight", "out.weight", "out.bias"}
    assert np.array_equal(tensors.initial()["table.weight"], reader().table.weight.detach().numpy())
    assert trained_bytes(bundle) == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.long
def test_a_trained_embedding_that_is_the_head_too_trains_as_plain_pytorch_and_is_whole_in_the_result(
    tmp_path: Path,
) -> None:
    model = adapted_model().requires_grad_(True)
    captured = with_expected_results(make_bundle.prepare(adapted_job(model, rows=3)), 2)
    assert len(captured.graphs) > 2, "the rest of the data, and the evaluation"
    tiled, device, _ = in_tight_room(captured)
    assert tiled.left_whole == () and not tiled.captured.blocks["parameter/embed.weight"].columns
    whole, graph = captured.graphs["step"], tiled.captured.graphs["step"]
    assert not any(s.name == "embed.weight" for s in graph.storages) and len(graph.ops) > len(whole.ops)
    bundle = written(tiled.captured, tiled.measured, device, tmp_path / "job.port")
    assert "state/embed.weight/exp_avg" in bundle.manifest.reference.checksums
    DryRunWorkers(1).dry_run(bundle.path, (tmp_path,), compared=2)


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_a_bundle_whose_blocks_do_not_make_up_the_weight_is_refused(
    tmp_path: Path, in_blocks_written: tuple[TiledJob, Bundle]
) -> None:

    def without_last(manifest: dict[str, Any]) -> dict[str, Any]:
        manifest["blocks"]["parameter/embed.weight"]["rows"].pop()
        return manifest

    rewrite(in_blocks_written[1].path, tmp_path / "other.port", {"manifest.json": without_last})
    with pytest.raises(BundleError, match=r"the blocks of parameter/embed\.weight do not cover it"):
        Bundle(tmp_path / "other.port")


@pytest.mark.slow
def test_blocks_that_differ_here_leave_the_weight_whole_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = make_bundle.prepare(adapted_job(adapted_model()))

    def odd(pairs: list[tuple[StepGraph, RewrittenGraph]], _: ComparisonLimits) -> tuple[tuple[Difference, ...], ...]:
        return tuple(tuple(Difference(r, "the third byte differs") for r in new.replacements[:1]) for _, new in pairs)

    monkeypatch.setattr(comparing, "compared", odd)
    device = costs_of(captured.graphs["step"], base=1 << 20).device
    recorded = TiledJob(captured, MeasuredCosts((), 0, 0), ())
    found = in_blocks(recorded, device, (1 << 20) + 600_000, ROOM, lambda *_: None)
    assert found == replace(recorded, left_whole=found.left_whole) and not found.captured.blocks
    assert set(found.left_whole) == {"embedding with embed.weight by rows in 6 blocks: the third byte differs"}
