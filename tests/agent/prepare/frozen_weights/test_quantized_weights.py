"""Frozen weights on a grid are codes in the bundle and decoded in its step, to the bit, where a plan costs less so."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from port_agent import packing
from port_agent.packing.quantized import NF4_LEVELS, Quantization
from port_agent.prepare.frozen_weights.quantized_weights import quantized, with_quantized_weights
from port_agent.prepare.measurement.dry_run import DryRunWorkers
from port_agent.prepare.measurement.within_budget import within_budget
from port_agent.prepare.reference import with_expected_results
from port_agent.training.result import save_result
from port_agent.training.trainer import Trainer
from port_planner import make_bundle
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.costs import CostTable, DeviceCosts, Flash, OpCost
from port_planner.ir.graph import Role
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.job import TrainingJob
from port_planner.make_bundle import CapturedJob
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.plan_step import PlanResult
from tests.agent.training.options import train_options

pytestmark = pytest.mark.skipif(not packing.available(), reason="packing was not built (no compiler)")

WIDTH, ROWS = 256, 4
DEVICE = DeviceCosts("test", 0, 1.0, 1.0, Flash("flash", 50e6, 20e6, 1e-4, 1e-8, 1e-8))


def rounded(weight: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """Return the weights of a grid next to these."""
    blocks = weight.float().view(-1, quantization.block)
    scales = blocks.abs().amax(1, keepdim=True) / quantization.largest
    levels = torch.tensor(NF4_LEVELS) if quantization is Quantization.NF4 else torch.arange(-127.0, 128.0)
    nearest = (blocks / scales)[..., None].sub(levels).abs().argmin(-1)
    return (levels[nearest] * scales).to(weight.dtype).view(weight.shape)


class Adapted(nn.Module):
    """Frozen layers on one grid and the other, one on none, and an adapter that is trained."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(5))).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, dtype=dtype), nn.Linear(4, WIDTH, dtype=dtype)
        with torch.no_grad():
            for k, quantization in enumerate((Quantization.INT8, Quantization.NF4) * 2):
                weight = self.base.get_parameter(f"{k}.weight")
                weight.copy_(rounded(weight, quantization))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.down(x))
        for layer in self.base:
            x = torch.tanh(layer(x))
        return x


def captured(dtype: torch.dtype = torch.float32) -> CapturedJob:
    torch.manual_seed(0)
    model = Adapted(dtype)
    loss = lambda model, x, y: functional.mse_loss(model(x), y)  # noqa: E731
    optimizer = torch.optim.AdamW([*model.down.parameters(), *model.up.parameters()], foreach=False)
    data = [torch.randn(3 * ROWS, WIDTH, dtype=dtype), torch.randn(3 * ROWS, WIDTH, dtype=dtype)]
    return make_bundle.prepare(TrainingJob(model, loss, optimizer, data, ROWS))


class Tabled(nn.Module):
    """Frozen layers in 32 bits whose numbers come from 16 bits, as of a model loaded with
    `dtype=float32`, and an adapter.
    """

    def __init__(self, short: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(500, WIDTH)
        self.base = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.to(short).to(torch.float32).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.up(self.down(self.table(tokens)))
        for layer in self.base:
            x = torch.tanh(layer(x))
        return functional.linear(x, self.table.weight)


def from_16_bits(short: torch.dtype) -> CapturedJob:
    torch.manual_seed(0)
    model = Tabled(short)
    loss = lambda model, x, y: functional.cross_entropy(model(x), y)  # noqa: E731
    optimizer = torch.optim.AdamW([*model.down.parameters(), *model.up.parameters()], foreach=False)
    data = [torch.randint(0, 500, (3 * ROWS,)), torch.randint(0, 500, (3 * ROWS,))]
    return make_bundle.prepare(TrainingJob(model, loss, optimizer, data, ROWS))


def flat(job: CapturedJob) -> MeasuredCosts:
    return MeasuredCosts(tuple(tuple(OpCost(1e-4, 0, 1e-4) for _ in g.ops) for g in job.graphs.values()), 0, 0)


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_decodes_them_trains_the_same_and_gives_them_back_whole(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = captured(dtype)
    coded = with_expected_results(quantized(whole), 2)
    graph = coded.graphs["step"]
    frozen = {f"parameter/base.{k}.weight" for k in range(5)}
    assert frozen - coded.tensors.keys() == frozen - {"parameter/base.4.weight"}, "the last lies on no grid"
    kept = [sum(s.nbytes for s in g.storages if s.persistent) for g in (whole.graphs["step"], graph)]
    assert kept[1] < kept[0] - 4 * WIDTH * WIDTH * (dtype.itemsize - 1.1)
    decoded = [s for s, storage in enumerate(graph.storages) if storage.name == "base.1.weight"]
    assert len(decoded) == 2, "for the forward pass, and once more for the backward pass"
    trains_the_same(whole, coded, tmp_path)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.usefixtures("torch_forks")
@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
def test_weights_from_16_bits_stay_in_16_and_train_the_same(short: torch.dtype, tmp_path: Path) -> None:
    whole = from_16_bits(short)
    coded = with_expected_results(quantized(whole), 2)
    kept = [sum(s.nbytes for s in job.graphs["step"].storages if s.persistent) for job in (whole, coded)]
    assert kept[1] == kept[0] - 2 * (4 * WIDTH + 500) * WIDTH
    trains_the_same(whole, coded, tmp_path)


def test_a_number_that_16_bits_do_not_have_leaves_its_weight_as_it_is() -> None:
    job = from_16_bits(torch.bfloat16)
    changed = job.tensors["parameter/base.3.weight"]
    assert isinstance(changed, torch.Tensor)
    changed.view(-1)[-1] = 1.0 + 2.0**-20
    kept = quantized(job).tensors
    assert "parameter/base.3.weight" in kept and "parameter/base.2.weight" not in kept
    assert "buffer/base.2.weight in 16 bits" in kept


def trains_the_same(whole: CapturedJob, coded: CapturedJob, tmp_path: Path) -> None:
    """Train whole and short of memory, compared with plain PyTorch, and compare the weights of the result."""
    graph = coded.graphs["step"]
    costs = CostTable(DEVICE, flat(coded).ops[0])
    for number, ram in enumerate((1 << 40, lower(graph, costs, Plan()).peak_bytes * 2 // 3)):
        planner = make_bundle.default_planner(strategy="greedy", time_limit_s=2.0)
        plans, tables = make_bundle.plan_all(coded, flat(coded), DEVICE, ram, planner)
        path = tmp_path / f"{number}.port"
        make_bundle.write(path, coded, [plans], tables, [ram], threads=torch.get_num_threads())
        DryRunWorkers(torch.get_num_threads()).dry_run(path, (tmp_path,), compared=2)
    trainer = Trainer(Bundle(path), train_options(tmp_path / "state", tmp_path, 0, 1))
    trainer.start()
    save_result(trainer.bundle, trainer.persistents, 0, tmp_path / "result.safetensors")
    trainer.close()
    saved, model = load_file(tmp_path / "result.safetensors"), whole.job.model.state_dict()
    assert saved.keys() == model.keys() and all(torch.equal(saved[name], model[name]) for name in saved)


@pytest.mark.slow
def test_they_stay_as_they_are_where_there_is_room_and_are_decoded_where_that_costs_less() -> None:
    whole = captured()
    planner = make_bundle.default_planner(strategy="greedy", time_limit_s=2.0)
    costs = CostTable(DEVICE, flat(whole).ops[0])
    peak = lower(whole.graphs["step"], costs, Plan()).peak_bytes
    for ram, roles in ((1 << 40, Role.PARAMETER), (peak // 2, Role.TEMPORARY)):
        found, measured = with_quantized_weights(whole, flat(whole), DEVICE, ram, planner, flat)
        assert {s.role for s in found.graphs["step"].storages if s.name == "base.1.weight"} == {roles}
        assert len(measured.ops[0]) == len(found.graphs["step"].ops)


@pytest.mark.slow
def test_they_are_found_where_planning_keeps_to_a_budget(tmp_path: Path) -> None:
    found = {key for key in quantized(captured()).tensors if key.endswith(" codes")}
    with within_budget(1 << 30, tmp_path):
        assert {key for key in quantized(captured()).tensors if key.endswith(" codes")} == found != set()


@pytest.mark.slow
def test_what_is_trained_or_off_the_grid_in_its_last_bit_is_left() -> None:
    job = captured()
    off = job.tensors["parameter/base.0.weight"]
    assert isinstance(off, torch.Tensor)
    off.view(-1)[77] = torch.nextafter(off.view(-1)[77], torch.tensor(9.0))
    assert "parameter/base.0.weight" in quantized(job).tensors
    graph = job.graphs["step"]
    trained = replace(graph, storages=tuple(replace(s) for s in graph.storages))
    writes = next(i for i, s in enumerate(trained.storages) if s.name == "base.1.weight")
    last = replace(trained.ops[-1], writes=(*trained.ops[-1].writes, writes))
    changed = replace(job, graphs={"step": replace(trained, ops=(*trained.ops[:-1], last))})
    assert "parameter/base.1.weight" in quantized(changed).tensors


@pytest.mark.slow
def test_nothing_is_planned_where_no_weight_is_frozen() -> None:
    def asked(*_: object) -> PlanResult:
        raise AssertionError("planned")

    job = captured()
    for parameter in job.job.model.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(job.job.model.parameters(), 1e-3)
    trained = make_bundle.prepare(replace(job.job, optimizer=optimizer))
    assert with_quantized_weights(trained, flat(trained), DEVICE, 1 << 20, asked, flat)[0] is trained
