"""A step on two devices gives the numbers of its operators run one by one on them; a broken order shows.

The device is the simulated one; here its products have last bits of their own, so that an operator on
the wrong device shows, too.
"""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.models import Workload, workload
from port_agent.backend.base import Event
from port_agent.backend.cpu import DONE
from port_agent.backend.staging import DeviceSide, Staging
from port_agent.backend.transfer_ring import RingCopy, TransferRing
from port_agent.prepare.placement.eager import EagerStep, eager_contents
from port_agent.training.executor import Executor
from port_agent.training.step_transfers import StepTransfers
from port_planner.capture.step import Capture, Fill, capture_step
from port_planner.ir.device_kinds import CPU
from port_planner.ir.devices.transfers import StorageTransfer, transfer_of
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.lowering.optimizer_scalars import StepScalars
from port_planner.ir.lowering.verify_program import verify_lowered
from port_planner.ir.operands.verify import verify_operands
from port_planner.ir.plan import Plan
from port_planner.problem.placed_step import PlacedStep, placed_step
from port_planner.search.placement.operator_devices import together_of
from tests.agent.exactness import OPTIMIZERS, Outcome, differences, flat_costs, plain, planned, random_plan
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process

Batches = list[tuple[torch.Tensor, ...]]
STEPS = 2
KEEP_ALL = Plan()
Pool = Callable[[torch.Tensor, int], torch.Tensor]


@pytest.fixture
def backend() -> Iterator[SimBackend]:
    made = SimBackend()
    made.races()
    made.use_own_bits(True)
    yield made
    made.use_own_bits(False)
    made.limit(None)


class Small(nn.Module):
    """Convolution, batch norm, a pool, dropout, a residual sum, a layer norm and a head."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool = pool
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.2)
        self.scale, self.head = nn.LayerNorm(4), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.pool(torch.relu(self.norm(self.conv(x))), 2)
        h = self.scale((h + self.second(h)).flatten(2).transpose(1, 2))
        return self.head(self.drop(h).flatten(1))


def small(pool: Pool = functional.avg_pool2d) -> Workload:
    """Return a model of all that a placed step may trip over, and batches."""
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 3, 8, 8, generator=g), torch.randint(0, 5, (4,), generator=g)) for _ in range(STEPS)]
    return Workload(Small(pool), lambda model, x, y: functional.cross_entropy(model(x), y), lambda i: data[i])


def made(case: str) -> Workload:
    if case == "max pool":  # its backward pass trusts the indices that its forward pass made
        return small(functional.max_pool2d)
    return small() if case == "small" else workload(case, small=True)


def captured(case: str) -> tuple[Capture, Batches]:
    """Return the step of a small model, recorded on the CPU, and batches."""
    w = made(case)
    optimizer = OPTIMIZERS["sgd" if case == "resnet18" else "adamw"](w.model.parameters())
    batches = [w.batch(i) for i in range(STEPS)]
    return capture_step(w.model, w.loss_fn, optimizer, batches[0]), batches


def random_kinds(graph: StepGraph, seed: int) -> tuple[str, ...]:
    """Return a device for each operator: runs of operators on either, those that write the same storage on one."""
    rng = random.Random(seed)
    kinds, kind = [], CPU
    for _ in graph.ops:
        kind = rng.choice((CPU, NAME)) if rng.random() < 0.3 else kind
        kinds.append(kind)
    for group in together_of(graph):
        for i in group:
            kinds[i] = kinds[group[0]]
    return tuple(kinds)


def eager(capture: Capture, kinds: Sequence[str], batches: Batches) -> Outcome:
    """Train by the operators one by one, each on its device."""
    tensors = {
        k: torch.full(t.shape, t.value, dtype=getattr(torch, t.dtype)) if isinstance(t, Fill) else t
        for k, t in capture.tensors.items()
    }
    assert capture.optimizer is not None
    scalars = StepScalars(capture.optimizer)
    step = EagerStep(capture.graphs["step"], kinds, eager_contents(tensors))
    torch.manual_seed(0)
    losses = [step.run(batch, scalars.advance()) for batch in batches]
    found = {}
    for key, layout in capture.layouts.items():
        flat = step.contents[key].cpu().view(torch.uint8).view(getattr(torch, layout.dtype))
        found[key] = flat.as_strided(layout.shape, layout.stride, layout.offset)
    return Outcome(losses, found)


def on_two(
    capture: Capture, step: PlacedStep, batches: Batches, folder: Path, backend: SimBackend, plan: Plan = KEEP_ALL
) -> Outcome:
    return planned(replace(capture, graphs={"step": step.graph}), {"step": plan}, batches, folder, backend=backend)


@pytest.mark.parametrize(
    "case", ["small", "max pool", *(pytest.param(case, marks=pytest.mark.long) for case in ("resnet18", "gpt2"))]
)
def test_a_placed_step_has_the_bits_of_its_operators_on_their_devices(
    case: str, tmp_path: Path, backend: SimBackend
) -> None:
    capture, batches = captured(case)
    graph = capture.graphs["step"]
    on_cpu = eager(capture, [CPU] * len(graph.ops), batches)
    for seed in (1, 2):
        kinds = random_kinds(graph, seed)
        there = placed_step(graph, kinds)
        verify_operands(there.graph)
        program = lower(there.graph, flat_costs(there.graph), Plan())
        verify_lowered(program)
        assert there.graph.device == NAME and None in there.origin
        expected = eager(capture, kinds, batches)
        gc.collect()
        before = backend.allocated_bytes()
        backend.reset_peak()
        actual = on_two(capture, there, batches, tmp_path / str(seed), backend)
        taken = backend.peak_bytes() - before
        assert not differences(expected, actual), (seed, differences(expected, actual)[:5])
        assert backend.races() == []
        assert abs(taken - program.peak_bytes) <= 1e-3 * program.peak_bytes + 8192, (taken, program.peak_bytes)
        assert differences(on_cpu, actual), "the device's bits are its own: where operators run shows in the numbers"


def test_random_plans_page_and_recompute_on_the_device_beside_operators_on_the_host(
    tmp_path: Path, backend: SimBackend
) -> None:
    capture, batches = captured("small")
    kinds = random_kinds(capture.graphs["step"], 3)
    there = placed_step(capture.graphs["step"], kinds)
    expected = eager(capture, kinds, batches)
    for seed in (1,):
        plan = random_plan(there.graph, seed, page=0.2, recompute=0.9)
        verify_lowered(lower(there.graph, flat_costs(there.graph), plan))
        assert any(transfer_of(there.graph, there.graph.ops[d.after]) for d in plan.decisions)
        actual = on_two(capture, there, batches, tmp_path / str(seed), backend, plan)
        assert not differences(expected, actual), seed
        assert backend.races() == []


class _ForgetsToWait(StepTransfers):
    def wait(self, target: int, touched: int) -> None:
        """Go on at once."""


class _CopiesAtOnce(StepTransfers):
    """Starts before the device has computed what it reads, or used for the last time what it overwrites."""

    def begin(self, transfer: StorageTransfer) -> None:
        source, target = self.values.whole(transfer.source), self.values.allocate(transfer.target)
        self.values.base[transfer.target] = target
        self._events[transfer.target] = self.backend.copy(target[: source.numel()], source, DONE)


class _LeavesOneOut(StepTransfers):
    """Does not copy; whoever reads the target finds what was in its memory."""

    def begin(self, transfer: StorageTransfer) -> None:
        self.values.base[transfer.target] = self.values.allocate(transfer.target).zero_()
        self._events[transfer.target] = self.backend.reached()


class _WaitsForTargetsAlone(StepTransfers):
    def wait(self, target: int, touched: int) -> None:
        """Let what a transfer reads be changed and freed meanwhile."""
        if touched == target:
            super().wait(target, touched)


@pytest.mark.parametrize("broken", [_ForgetsToWait, _CopiesAtOnce, _LeavesOneOut, _WaitsForTargetsAlone])
def test_a_wait_or_a_copy_that_is_left_out_shows(
    broken: type[StepTransfers], tmp_path: Path, backend: SimBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, batches = captured("small")
    kinds = random_kinds(capture.graphs["step"], 1)
    there = placed_step(capture.graphs["step"], kinds)
    expected = eager(capture, kinds, batches)
    monkeypatch.setattr("port_agent.training.executor.StepTransfers", broken)
    try:
        found = differences(expected, on_two(capture, there, batches, tmp_path, backend))
    except IndexError as error:  # garbage for a label
        found = [str(error)]
    assert found
    assert bool(backend.races()) == (broken in (_ForgetsToWait, _CopiesAtOnce))


def test_an_operator_on_the_wrong_device_shows(tmp_path: Path, backend: SimBackend) -> None:
    capture, batches = captured("small")
    graph = capture.graphs["step"]
    kinds = random_kinds(graph, 1)
    expected = eager(capture, kinds, batches)
    grouped = {i for group in together_of(graph) for i in group}
    product = next(i for i, op in enumerate(graph.ops) if op.name in ("aten::addmm", "aten::mm") and i not in grouped)
    moved = (*kinds[:product], CPU if kinds[product] == NAME else NAME, *kinds[product + 1 :])
    assert differences(expected, on_two(capture, placed_step(graph, moved), batches, tmp_path, backend))


def test_with_kernels_that_give_the_cpus_bits_placed_steps_are_plain_pytorchs(
    tmp_path: Path, backend: SimBackend
) -> None:
    backend.use_own_bits(False)
    capture, batches = captured("small")
    w = small()
    expected = plain(w.model, w.loss_fn, OPTIMIZERS["adamw"], batches)
    there = placed_step(capture.graphs["step"], random_kinds(capture.graphs["step"], 1))
    assert not differences(expected, on_two(capture, there, batches, tmp_path, backend))


def test_the_host_holds_at_most_what_the_program_says_of_it(
    tmp_path: Path, backend: SimBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, batches = captured("small")
    there = placed_step(capture.graphs["step"], random_kinds(capture.graphs["step"], 2))
    held, compiled = [0], Executor._compile

    def counted(executor: Executor) -> list[Callable[[], None]]:
        def noting(instruction: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                instruction()
                there = zip(executor.graph.storages, executor.values.base, strict=True)
                held.append(sum(s.nbytes for s, base in there if base is not None and s.device == CPU))

            return run

        return [noting(instruction) for instruction in compiled(executor)]

    monkeypatch.setattr(Executor, "_compile", counted)
    for seed in (0, 1):
        plan = random_plan(there.graph, seed, page=0.0, recompute=0.9) if seed else KEEP_ALL
        held.clear()
        on_two(capture, there, batches, tmp_path / str(seed), backend, plan)
        assert max(held) == lower(there.graph, flat_costs(there.graph), plan).beside_bytes, seed


CHUNK = 512
"""Bytes of a ring's buffer: most of what a small step transfers takes several chunks."""


def through_ring(
    folder: Path, backend: SimBackend, monkeypatch: pytest.MonkeyPatch, ring: TransferRing
) -> tuple[list[str], list[str]]:
    """Return what differs from the operators one by one, and what happened before its time."""
    capture, batches = captured("small")
    kinds = random_kinds(capture.graphs["step"], 1)
    there = placed_step(capture.graphs["step"], kinds)
    expected = eager(capture, kinds, batches)
    monkeypatch.setattr("port_agent.training.step_transfers.MIN_BYTES", 1)
    monkeypatch.setattr(
        "port_agent.training.executor.StepTransfers", lambda values, device, _: StepTransfers(values, device, ring)
    )
    try:
        found = differences(expected, on_two(capture, there, batches, folder, backend))
    except IndexError as error:  # garbage for a label
        found = [str(error)]
    finally:
        ring.close()
    return found, backend.races()


def test_through_the_ring_a_placed_step_has_the_same_bits(
    tmp_path: Path, backend: SimBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert through_ring(tmp_path, backend, monkeypatch, TransferRing(backend, CHUNK)) == ([], [])


def _early_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill a buffer again while the device still takes what was in it."""

    def take(ring: Staging) -> int:
        ring._turn = (ring._turn + 1) % len(ring.buffers)
        return ring._turn

    monkeypatch.setattr(Staging, "take", take)


def _wrong_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say of a copy into the device that it has arrived when it is issued."""

    def landed(copy: RingCopy) -> Event:
        copy._issued.result()
        return DONE

    monkeypatch.setattr(RingCopy, "landed", landed)


def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty a buffer before the device has filled it."""
    begin = DeviceSide._begin

    def at_once(side: DeviceSide, place: int, nbytes: int) -> None:
        begin(side, place, nbytes)
        buffer, taken, _ = side._ahead[place]
        side._ahead[place] = buffer, taken, DONE

    monkeypatch.setattr(DeviceSide, "_begin", at_once)


def _too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy out of the device before it has computed what is copied."""
    monkeypatch.setattr(Staging, "side", lambda ring, contents: DeviceSide(ring, contents, DONE))


@pytest.mark.parametrize("mutate", [_early_free, _wrong_event, _no_wait, _too_early])
def test_a_ring_with_a_wait_left_out_or_a_wrong_event_shows(
    mutate: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, backend: SimBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    found, _ = through_ring(tmp_path, backend, monkeypatch, TransferRing(backend, CHUNK))
    assert found
