"""On a device of its own memory the numbers are the CPU's, the peak is the plan's, and a broken order shows.

The device is simulated (`tests/simulated_device.py`): what runs here is the executor, the planner and the page thread as they
are, and no GPU.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from agent.backend.cpu import DONE
from agent.train.pager import CorruptPageError
from planner.capture.step import Capture, capture_step
from planner.ir.lowering.lower import lower
from planner.ir.plan import Action, Plan
from planner.ir.program import Code
from tests.agent.exactness import OPTIMIZERS, Outcome, differences, flat_costs, plain, planned, random_plan
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process

KEPT = 128
"""What a step of `Small` holds beside the plan: a copy of the running statistics, for `undo`, and of the loss."""

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


def batches(count: int) -> Batches:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 8, 8, generator=g), torch.randint(0, 10, (4,), generator=g)) for _ in range(count)]


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


# -- a broken order shows


def paging(graph_of: Capture) -> Plan:
    """Return a plan that pages activations, weights and optimizer state."""
    plan = random_plan(graph_of.graphs["step"], 3, page=0.9, recompute=0.0, slices=0.0)
    codes = {i.code for i in lower(graph_of.graphs["step"], flat_costs(graph_of.graphs["step"]), plan).instructions}
    assert {Code.WRITE, Code.READ, Code.WAIT_READ, Code.WAIT_WRITE} <= codes
    return replace(plan, strategy="random")


class ForgetsToWait(SimBackend):
    """What the device computes does not wait for what was copied to it."""

    def wait(self, event: object) -> None:
        del event


class CopiesAtOnce(SimBackend):
    """Copies start without waiting for what was computed: the wrong event."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: object) -> object:  # type: ignore[override]
        return super().copy(target, source, DONE)


class DoesNotWaitForTheCopy(SimBackend):
    """The page thread writes what the copy has not brought yet, and memory is freed before it has left."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: object) -> object:  # type: ignore[override]
        event = super().copy(target, source, after)  # type: ignore[arg-type]
        return DONE if target.is_cpu else event


@pytest.mark.parametrize("broken", [ForgetsToWait, CopiesAtOnce, DoesNotWaitForTheCopy])
def test_an_executor_with_a_broken_order_gives_other_numbers(
    broken: type[SimBackend], tmp_path: Path, backend: SimBackend
) -> None:
    data = batches(2)
    expected = plain(small(), classify, OPTIMIZERS["sgd"], data)
    capture = captured("sgd", data)
    plan = paging(capture)
    assert not differences(expected, on_device(capture, plan, data, tmp_path / "sound", backend))
    assert backend.races() == []
    try:
        found = differences(expected, on_device(capture, plan, data, tmp_path / "broken", broken()))
    except (CorruptPageError, IndexError) as error:  # a page changed on its way; a label that is garbage
        found = [str(error)]
    assert found
    assert broken is DoesNotWaitForTheCopy or backend.races()
    backend.races()
