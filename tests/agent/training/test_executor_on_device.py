"""On a device of its own memory the numbers are the CPU's, the peak is the plan's, and a broken order shows.

The device is simulated (`tests/simulated_device.py`): what runs here is the executor, the planner and the page
thread as they are, and no GPU.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.device_steps import Job, plain_steps, planned_steps
from benchmarks.device_steps import captured as captured_job
from benchmarks.models import Workload, workload
from port_agent.backend.cpu import DONE
from port_agent.backend.staging import BUFFERS, Staging
from port_agent.paging.pager import CorruptPageError, Pager
from port_agent.training.executor import _AHEAD, Executor
from port_planner.base.direct_io import BLOCK
from port_planner.capture.step import Capture, capture_step
from port_planner.ir.costs import CostTable, Flash
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.host_pages import HostMemoryError
from port_planner.ir.lowering.lower import lower
from port_planner.ir.lowering.verify_program import verify_lowered
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import Code, Program
from port_planner.profiling.operator_profile import profile_operators
from port_planner.search.plan_step import plan_step
from tests.agent import exactness
from tests.agent.exactness import OPTIMIZERS, Outcome, differences, flat_costs, plain, planned, random_plan
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process

KEPT = 128
"""What a step of `Small` holds beside the plan: a copy of the running statistics, for `undo`, and of the loss."""

SLOW_BYTES_PER_S = 4 << 20
"""Of a medium that takes a page long after the device could have gone on: what waits for it
is on the device meanwhile.
"""

KEPT_AT_MOST = 1 << 16
"""The same, of the models of `benchmarks.models`."""

Batches = list[tuple[torch.Tensor, ...]]


class Small(nn.Module):
    """Convolution, batch norm, dropout, a residual sum, attention without its kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.drop = nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.2)
        self.scale, self.head = nn.LayerNorm(8), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.conv(x)))
        h = h + self.second(h)
        h = self.scale(h.flatten(2).transpose(1, 2))
        return self.head(self.drop(torch.softmax(h, -1)).flatten(1))


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def batches(count: int, rows: int = 4) -> Batches:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 3, 8, 8, generator=g), torch.randint(0, 10, (rows,), generator=g)) for _ in range(count)]


@pytest.fixture
def backend() -> Iterator[SimBackend]:
    made = SimBackend()
    made.races()
    yield made
    made.limit(None)


def small() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def captured(optimizer: str, data: Batches) -> Capture:
    """Return the step, captured where its model is: on the device."""
    model = small().to(NAME)
    there = tuple(t.to(NAME) for t in data[0])
    return capture_step(model, classify, OPTIMIZERS[optimizer](model.parameters()), there)


def on_device(capture: Capture, plan: Plan, data: Batches, folder: Path, backend: SimBackend) -> Outcome:
    return planned(capture, {"step": plan}, data, folder, backend=backend)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_keeps_everything(optimizer: str, tmp_path: Path, backend: SimBackend) -> None:
    data = batches(3)
    expected = plain(small(), classify, OPTIMIZERS[optimizer], data)
    capture = captured(optimizer, data)
    assert capture.graphs["step"].device == NAME
    assert not differences(expected, on_device(capture, Plan(), data, tmp_path, backend))
    assert backend.races() == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_random_plans_that_page_through_the_host_recompute_and_slice(
    optimizer: str, tmp_path: Path, backend: SimBackend
) -> None:
    data = batches(3)
    expected = plain(small(), classify, OPTIMIZERS[optimizer], data)
    capture = captured(optimizer, data)
    graph = capture.graphs["step"]
    seen: set[Action] = set()
    for seed in range(1, 5):
        plan = random_plan(graph, seed, page=0.1 * seed, recompute=0.9)
        seen |= {d.action for d in plan.decisions}
        actual = on_device(capture, plan, data, tmp_path / str(seed), backend)
        assert not differences(expected, actual), seed
        assert backend.races() == []
    assert seen >= {Action.PAGE, Action.RECOMPUTE}


def test_a_pause_waits_for_the_device_and_the_host_is_never_far_ahead(
    tmp_path: Path, backend: SimBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = batches(2)
    capture, run, keep_pace = captured("adamw", data), Executor.run, Executor._keep_pace
    paused: list[bool] = []
    ahead: list[int] = []

    def interrupted(executor: Executor, *arguments: Any) -> Any:
        executor.interrupted = True
        executor.gate = lambda: paused.append(backend.idle())
        return run(executor, *arguments)

    def counted(executor: Executor) -> None:
        keep_pace(executor)
        ahead.append(backend.ahead())

    monkeypatch.setattr(Executor, "_keep_pace", counted)
    on_device(capture, Plan(), data, tmp_path / "free", backend)
    launched = 2 * _AHEAD + 2 * len(capture.graphs["step"].batch)  # views and copies of a batch are works, too
    assert ahead and max(ahead) <= 2 * launched
    monkeypatch.setattr(Executor, "run", interrupted)
    on_device(capture, Plan(), data, tmp_path / "paused", backend)
    assert paused and all(paused)


def test_the_device_holds_at_most_what_the_plan_says_and_the_plan_is_not_too_careful(
    tmp_path: Path, backend: SimBackend
) -> None:
    data = batches(2)
    capture = captured("sgd", data)
    graph = capture.graphs["step"]
    for seed in (0, 1, 2):
        plan = random_plan(graph, seed, page=0.4, slices=0.0) if seed else Plan()
        program = lower(graph, flat_costs(graph), plan)
        gc.collect()
        before = backend.allocated_bytes()
        backend.reset_peak()
        backend.limit(before + program.peak_bytes + KEPT)
        on_device(capture, plan, data, tmp_path / str(seed), backend)
        backend.limit(None)
        taken = backend.peak_bytes() - before
        assert abs(taken - program.peak_bytes) <= 1e-3 * program.peak_bytes, (seed, taken, program.peak_bytes)


def test_a_device_that_is_too_small_is_said_by_torch_and_nothing_is_left_on_it(
    tmp_path: Path, backend: SimBackend
) -> None:
    data = batches(2)
    capture = captured("sgd", data)
    graph = capture.graphs["step"]
    gc.collect()
    before = backend.allocated_bytes()
    backend.limit(before + lower(graph, flat_costs(graph), Plan()).peak_bytes // 2)
    try:
        said = str(on_device(capture, Plan(), data, tmp_path, backend))
    except torch.OutOfMemoryError as error:
        said = str(error)
    gc.collect()
    assert "bytes asked for" in said
    backend.limit(None)
    assert backend.allocated_bytes() == before


# -- the host's memory as a target, flash behind it


def costs_beside_host(graph: StepGraph, host_bytes: int) -> CostTable:
    """Return costs of a device with its own memory: the host's is fast, of so many bytes, and an SD card is behind it.

    Operators as measured on the device, that is with their workspace, and so expensive that none is run twice.
    """
    measured = profile_operators((graph,), compute_watts=1.0)
    ops = tuple(replace(c, seconds=1e-4, joules=1.0) for c in measured.ops[0])
    costs = replace(flat_costs(graph), ops=ops)
    host = Flash("host", 1e10, 1e10, 1e-6, 1e-11, 1e-11, capacity_bytes=host_bytes)
    return replace(costs, device=replace(costs.device, scratch_targets=(host,)))


def to_host(graph: StepGraph, plan: Plan, every: int = 1, *, lasting: bool = False) -> Plan:
    """Return a plan that sends every n-th page of the step's temporaries to the host's memory.

    `lasting`: also send every n-th weight and optimizer state there.
    """

    def moves(i: int, d: Decision) -> bool:
        storage = graph.storages[d.storage]
        if d.action is not Action.PAGE or storage.device != graph.device:
            return False
        return (lasting and d.storage % every == 0) if storage.persistent else i % every == 0

    moved = [replace(d, target=1) if moves(i, d) else d for i, d in enumerate(plan.decisions)]
    return replace(plan, decisions=tuple(moved))


def of_what_lasts(graph: StepGraph, plan: Plan, *, lasting: bool = True) -> Plan:
    """Return the plan with pages of weights and optimizer state alone, or of all but those."""
    kept = (d for d in plan.decisions if d.action is not Action.PAGE or graph.storages[d.storage].persistent is lasting)
    return replace(plan, decisions=tuple(kept))


@pytest.mark.parametrize(("every", "lasting"), [(1, False), (2, True)])
def test_pages_lie_in_the_hosts_memory_or_on_flash_behind_it(
    every: int, lasting: bool, tmp_path: Path, backend: SimBackend
) -> None:
    data = batches(3)
    expected = plain(small(), classify, OPTIMIZERS["adamw"], data)
    capture = captured("adamw", data)
    graph = capture.graphs["step"]
    costs = costs_beside_host(graph, 1 << 30)
    for seed in (1, 2, 3):
        plan = to_host(graph, random_plan(graph, seed, page=0.3 * seed, recompute=0.5), every, lasting=lasting)
        program = lower(graph, costs, plan)
        verify_lowered(program)
        assert bool(program.starts_on_host) == lasting
        targets = {i.target for i in program.instructions if i.code is Code.WRITE}
        assert 1 in targets and program.host_bytes > 0
        folder = tmp_path / str(seed)
        gc.collect()
        before = backend.allocated_bytes()
        backend.reset_peak()
        actual = planned(capture, {"step": plan}, data, folder, backend=backend, costs={"step": costs})
        assert not differences(expected, actual), seed
        assert backend.races() == []
        taken = backend.peak_bytes() - before
        assert taken <= 1.001 * program.peak_bytes + KEPT, (seed, taken, program.peak_bytes)


def wide(data: Batches) -> Capture:
    """Return the step of `Small` on 64 images: its activations are large enough to be planned about."""
    torch.manual_seed(0)
    model = Small().to(NAME)
    return capture_step(model, classify, OPTIMIZERS["sgd"](model.parameters()), tuple(t.to(NAME) for t in data[0]))


def test_the_planner_uses_the_hosts_memory_first_and_flash_for_what_it_does_not_hold(
    tmp_path: Path, backend: SimBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exactness, "Pager", partial(Pager, write_bytes_per_s=SLOW_BYTES_PER_S))
    data = batches(2, rows=64)
    expected = plain(small(), classify, OPTIMIZERS["sgd"], data)
    capture = wide(data)
    graph = capture.graphs["step"]
    keep_all = lower(graph, costs_beside_host(graph, 0), Plan()).peak_bytes
    found = {}
    room = [1 << 30, 0]
    while room:
        host_bytes = room.pop(0)
        costs = costs_beside_host(graph, host_bytes)
        costs = replace(
            costs, ops=tuple(replace(c, seconds=c.seconds, joules=1.0) for c in costs.ops)
        )  # recomputing is expensive
        result = plan_step(graph, costs, ram_bytes=int(0.75 * keep_all), time_limit_s=10.0)
        assert result.plan is not None, result.message
        program = lower(graph, costs, result.plan)
        assert program.host_bytes <= host_bytes and program.peak_bytes <= 0.75 * keep_all
        found[host_bytes] = program.written_to
        if len(found) == 1:
            room.insert(0, program.host_bytes // 2)
        gc.collect()
        before = backend.allocated_bytes()
        backend.reset_peak()
        backend.limit(before + int(0.75 * keep_all) + KEPT)  # never hit
        actual = planned(
            capture, {"step": result.plan}, data, tmp_path / str(host_bytes), backend=backend, costs={"step": costs}
        )
        backend.limit(None)
        assert not differences(expected, actual)
        assert backend.races() == []
        taken = backend.peak_bytes() - before
        assert abs(taken - program.peak_bytes) <= 1e-3 * program.peak_bytes
    (flash, host), (some_flash, some_host), (all_flash, none) = found.values()
    assert host > 0 and flash == 0, "the host's memory is cheaper than the card"
    assert some_flash > 0 and some_host > 0
    assert all_flash > 0 and none == 0


def deep_model() -> nn.Module:
    """Return a model whose weights and optimizer state are large, and whose activations are not."""
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(192, 192), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(192, 10))


def test_the_planner_keeps_optimizer_state_in_the_hosts_memory_and_on_flash_where_that_is_full(
    tmp_path: Path, backend: SimBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exactness, "Pager", partial(Pager, write_bytes_per_s=SLOW_BYTES_PER_S))
    data = batches(3)
    expected = plain(deep_model(), classify, OPTIMIZERS["adamw"], data)
    model = deep_model().to(NAME)
    there = tuple(t.to(NAME) for t in data[0])
    capture = capture_step(model, classify, OPTIMIZERS["adamw"](model.parameters()), there)
    graph = capture.graphs["step"]
    measured = costs_beside_host(graph, 0)
    budget = int(0.6 * lower(graph, measured, Plan()).peak_bytes)
    room, found = [1 << 30, 0], list[Program]()
    while room:
        host_bytes = room.pop(0)
        host = replace(measured.device.scratch_targets[0], capacity_bytes=host_bytes)
        costs = replace(measured, device=replace(measured.device, scratch_targets=(host,)))
        result = plan_step(graph, costs, ram_bytes=budget, strategy="greedy", time_limit_s=3.0)
        assert result.plan is not None, result.message
        program = lower(graph, costs, result.plan)
        verify_lowered(program)
        assert program.host_bytes <= host_bytes and program.peak_bytes <= budget
        found.append(program)
        if len(found) == 1:
            room.insert(0, program.host_bytes // 2)
        gc.collect()
        before = backend.allocated_bytes()
        backend.reset_peak()
        backend.limit(before + budget + KEPT)  # never hit
        actual = planned(
            capture, {"step": result.plan}, data, tmp_path / str(host_bytes), backend=backend, costs={"step": costs}
        )
        backend.limit(None)
        assert not differences(expected, actual)
        assert backend.races() == []
        taken = backend.peak_bytes() - before
        assert taken <= 1.001 * program.peak_bytes + KEPT_AT_MOST, (taken, program.peak_bytes)
    assert [(bool(p.starts_on_host), bool(p.starts_on_flash)) for p in found] == [
        (True, False),
        (True, True),
        (False, True),
    ], "the host's memory is cheaper than the card"


def test_a_plan_for_more_host_memory_than_there_is_is_refused() -> None:
    data = batches(1)
    SimBackend()
    graph = captured("sgd", data).graphs["step"]
    plan = replace(to_host(graph, random_plan(graph, 3, page=0.9, recompute=0.0)), ram_bytes=1 << 40)
    with pytest.raises(HostMemoryError, match="raise --ram, or --gpu-ram"):
        lower(graph, costs_beside_host(graph, 1000), plan)


class UNetBlock(nn.Module):
    """One level of a UNet: a residual block with group norm and a time embedding, down, attention, up, and the skip."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first, self.time = nn.Conv2d(3, channels, 3, padding=1), nn.Linear(8, channels)
        self.norm, self.second = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.down, self.qkv = nn.Conv2d(channels, channels, 3, stride=2, padding=1), nn.Linear(channels, 3 * channels)
        self.out = nn.Conv2d(2 * channels, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.first(x) + self.time(t)[:, :, None, None]
        skip = h + self.second(functional.silu(self.norm(h)))
        low = self.down(skip)
        q, k, v = self.qkv(low.flatten(2).transpose(1, 2)).chunk(3, -1)
        mixed = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1) @ v
        low = low + mixed.transpose(1, 2).reshape(low.shape)
        return self.out(torch.cat((functional.interpolate(low, scale_factor=2.0), skip), 1))


def unet_block() -> Workload:
    torch.manual_seed(0)

    def batch(i: int) -> tuple[torch.Tensor, ...]:
        g = torch.Generator().manual_seed(i)
        return tuple(torch.randn(shape, generator=g) for shape in ((2, 3, 32, 32), (2, 8), (2, 3, 32, 32)))

    return Workload(UNetBlock(), lambda model, x, t, noise: functional.mse_loss(model(x, t), noise), batch)


def one_block() -> Workload:
    """Return a GPT-2 of one block."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return replace(
        workload("gpt2", small=True), model=GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=64, n_layer=1, n_head=4))
    )


QUICK = {"unet block": (unet_block, "adamw"), "gpt2 of one block": (one_block, "sgd")}
"""Models that the whole suite trains beside ResNet-18, with their optimizers."""

CELLS = {
    "kept": [False, False],
    "recomputed": [False, False],
    "paged to the host": [False, True],
    "paged to flash through the host": [True, False],
    "weights and optimizer state on the host": [False, True],
    "weights and optimizer state on flash": [True, False],
    "updates in slices": [True, True],
}
"""What a step does, and whether anything is written to flash and to the host's memory then."""


def cells(graph: StepGraph) -> dict[str, Plan]:
    paged = random_plan(graph, 2, page=0.5, recompute=0.0, slices=0.0)
    within, lasting = of_what_lasts(graph, paged, lasting=False), of_what_lasts(graph, paged)
    sliced = random_plan(graph, 3, page=0.5, recompute=0.0, slices=1.0)
    plans = (
        Plan(),
        random_plan(graph, 2, page=0.0, recompute=0.15, slices=0.0),
        to_host(graph, within),
        within,
        to_host(graph, lasting, lasting=True),
        lasting,
        to_host(graph, sliced, 2, lasting=True),
    )
    return dict(zip(CELLS, plans, strict=True))


@pytest.mark.parametrize(
    "name", ["resnet18", *QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", "unet2d"))]
)
def test_small_models_give_what_plain_pytorch_gives_on_the_device(
    name: str, tmp_path: Path, backend: SimBackend
) -> None:
    """Each of `CELLS`: plain PyTorch's bits, never more than the plan says, and within 0.1 % of that where
    no update runs in slices.
    """
    make, optimizer = QUICK.get(name, (lambda: workload(name, small=True), "adamw"))
    job = Job(name, make, optimizer)
    expected = plain_steps(job, backend, 2)
    assert not expected.difference(plain_steps(job, backend, 2)), "plain PyTorch does not repeat itself"
    capture = captured_job(job, NAME)
    graph = capture.graphs["step"]
    costs = costs_beside_host(graph, 1 << 30)
    for kind, plan in cells(graph).items():
        program = lower(graph, costs, plan)
        moved = [nbytes > 0 for nbytes in program.written_to]
        again = any(i.code is Code.RERUN for i in program.instructions)
        assert (moved, again) == (CELLS[kind], kind == "recomputed"), kind
        assert bool(program.slice_counts) == (kind == "updates in slices"), kind
        gc.collect()
        before = backend.allocated_bytes()
        backend.limit(int(before + 1.001 * program.peak_bytes) + KEPT_AT_MOST)  # never hit
        done = planned_steps(job, capture, program, backend, tmp_path / kind, 2)
        backend.limit(None)
        assert not done.difference(expected), kind
        assert backend.races() == []
        if not program.slice_counts:
            off, near = program.peak_bytes - done.peak_bytes, 1e-3 * program.peak_bytes + KEPT_AT_MOST
            left = sum(
                graph.storages[s].nbytes for s in program.cross_step
            )  # writes that the step before left under way
            assert -near <= off <= near + left, kind


# -- memory that the device shares with the host


@pytest.fixture
def unified(backend: SimBackend) -> SimBackend:
    backend.unified = True
    return backend


@pytest.mark.parametrize("slices", [0.0, 1.0], ids=["whole updates", "updates in slices"])
def test_pages_in_shared_memory_are_not_copied_and_give_the_same_numbers(
    slices: float, tmp_path: Path, unified: SimBackend
) -> None:
    data = batches(3)
    expected = plain(small(), classify, OPTIMIZERS["adamw"], data)
    capture = captured("adamw", data)
    plan = random_plan(capture.graphs["step"], 3, page=0.9, recompute=0.0, slices=slices)
    copied = []
    for shares in (False, True):
        unified.copied_bytes()
        actual = planned(capture, {"step": plan}, data, tmp_path / str(shares), backend=unified, shares=shares)
        assert not differences(expected, actual), shares
        assert unified.races() == []
        copied.append(unified.copied_bytes())
    assert copied[1] < 0.6 * copied[0], "all that is read, and what is written of that again"


class ReachedAtOnce(SimBackend):
    """The device is said to be done with all that it was given."""

    def reached(self) -> Any:
        return DONE


def test_pages_that_the_host_takes_before_the_device_is_done_show(tmp_path: Path, unified: SimBackend) -> None:
    data = batches(2)
    expected = plain(small(), classify, OPTIMIZERS["sgd"], data)
    capture = captured("sgd", data)
    plan, broken = paging(capture), ReachedAtOnce()
    broken.unified = True
    try:
        outcome = planned(capture, {"step": plan}, data, tmp_path, backend=broken, shares=True)
        assert differences(expected, outcome)
    except (CorruptPageError, IndexError):
        pass
    assert any("the host reaches bytes" in race for race in broken.races())


# -- a broken order shows


def paging(graph_of: Capture) -> Plan:
    """Return a plan that pages activations, weights and optimizer state."""
    plan = random_plan(graph_of.graphs["step"], 3, page=0.9, recompute=0.0, slices=0.0)
    codes = {i.code for i in lower(graph_of.graphs["step"], flat_costs(graph_of.graphs["step"]), plan).instructions}
    assert {Code.WRITE, Code.READ, Code.WAIT_READ, Code.WAIT_WRITE} <= codes
    return plan


class ForgetsToWait(SimBackend):
    """What the device computes does not wait for what was copied to it."""

    def wait(self, event: object) -> None:
        del event


class CopiesAtOnce(SimBackend):
    """Copies start without waiting for what was computed: the wrong event."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: object) -> object:  # type: ignore[override]
        return super().copy(target, source, DONE)


class FreesEarly(SimBackend):
    """A copy to the host is said to be there at once: its source is freed, and its page written, before it has left."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: object) -> object:  # type: ignore[override]
        event = super().copy(target, source, after)  # type: ignore[arg-type]
        return DONE if target.is_cpu else event


class UsesBeforeItArrives(SimBackend):
    """A copy to the device is said to be there at once."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: object) -> object:  # type: ignore[override]
        event = super().copy(target, source, after)  # type: ignore[arg-type]
        return event if target.is_cpu else DONE


class AnEventBehind(SimBackend):
    """Each copy gives the event of the copy before it."""

    def __init__(self) -> None:
        super().__init__()
        self._before: object = DONE

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: object) -> object:  # type: ignore[override]
        before, self._before = self._before, super().copy(target, source, after)  # type: ignore[arg-type]
        return before


def taken_at_once(staging: Staging) -> int:
    """Give the next buffer though the device may not have taken what is in it."""
    staging._turn = (staging._turn + 1) % BUFFERS
    return staging._turn


LEVELS = {
    "flash through the host": {0},
    "host": {1},
    "weights and optimizer state on the host": {1},
    "slices of the host's copies": {1},
    "host and flash": {0, 1},
}
"""Where pages go, and the paging targets of that."""


@pytest.mark.parametrize(
    "level", [pytest.param(level, marks=pytest.mark.long) if level == "host and flash" else level for level in LEVELS]
)
def test_an_executor_with_a_broken_order_gives_other_numbers(
    level: str, tmp_path: Path, backend: SimBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = batches(2)
    expected = plain(small(), classify, OPTIMIZERS["sgd"], data)
    capture = captured("sgd", data)
    graph = capture.graphs["step"]
    costs = costs_beside_host(graph, 1 << 30)
    flash = paging(capture)
    lasting = to_host(graph, of_what_lasts(graph, flash), lasting=True)
    streamed = to_host(graph, of_what_lasts(graph, random_plan(graph, 3, page=0.9, slices=1.0)), lasting=True)
    plans = (
        flash,
        to_host(graph, of_what_lasts(graph, flash, lasting=False)),
        lasting,
        streamed,
        to_host(graph, flash, 2, lasting=True),
    )
    plan = dict(zip(LEVELS, plans, strict=True))[level]
    program = lower(graph, costs, plan)
    targets = {i.target for i in program.instructions if i.code is Code.WRITE}
    assert targets == LEVELS[level] and bool(program.slice_counts) == level.startswith("slices")

    def found(name: str, used: SimBackend) -> list[str]:
        try:
            outcome = planned(capture, {"step": plan}, data, tmp_path / name, backend=used, costs={"step": costs})
        except (CorruptPageError, IndexError) as error:  # a page changed on its way; a label that is garbage
            return [str(error)]
        return differences(expected, outcome)

    assert not found("sound", backend)
    assert backend.races() == []
    for broken in (ForgetsToWait, CopiesAtOnce, FreesEarly, UsesBeforeItArrives, AnEventBehind):
        assert found(broken.__name__, broken()), broken
        assert broken is FreesEarly or backend.races(), broken
        backend.races()
    if 0 in targets:  # pages of the host's memory pass through no buffers
        for name in ("CHUNK", "BURST"):  # a page of more chunks than buffers: nobody waits before its last one is sent
            monkeypatch.setattr(f"port_agent.paging.pager.{name}", BLOCK)
        assert not found("sound in chunks", backend)
        monkeypatch.setattr(Staging, "take", taken_at_once)
        assert found("ring", backend)
