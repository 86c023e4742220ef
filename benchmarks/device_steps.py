"""Steps of a model on a device, by plain PyTorch and by a planned program, with the device memory that each took."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree
import xxhash

from benchmarks.models import Workload, make_optimizer
from port_agent.backend.base import Backend
from port_agent.backend.raw_bytes import placed, whole_bytes
from port_agent.backend.staging import Staging
from port_agent.paging.pager import BURST, CHUNK, Pager
from port_agent.training.executor import Executor, StepContents
from port_agent.training.state.checkpoint import StateStore
from port_agent.training.state.resident_state import Persistents
from port_agent.training.step_paging import Scratch
from port_agent.training.step_values import StepValues
from port_planner.capture.step import Capture, Fill, capture_step
from port_planner.ir.lowering.optimizer_scalars import StepScalars
from port_planner.ir.program import Program

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained: `make` creates the model, each time with the same weights."""

    name: str
    make: Callable[[], Workload]
    optimizer: str


@dataclass(slots=True)
class DeviceRun:
    """Results of a few steps: digests of losses and of all that lasts, seconds of the last
    step, the most bytes held.
    """

    losses: list[str] = field(default_factory=list)
    contents: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    """The most that torch's allocator took of the device for all tensors, including gaps
    between them; 0 if it has none.
    """

    def difference(self, other: "DeviceRun") -> str:
        """Return what differs first, or "" if every bit is the same."""
        for i, (a, b) in enumerate(zip(self.losses, other.losses, strict=True)):
            if a != b:
                return f"the loss of step {i + 1}"
        known = self.contents.keys() & other.contents.keys()
        return next((name for name in sorted(known) if self.contents[name] != other.contents[name]), "")


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy().data) if flat.numel() else ""


def on_device(batch: Sequence[Any], kind: str) -> tuple[Any, ...]:
    """Return a batch whose tensors are on a kind of device."""
    return tuple(pytree.tree_map_only(torch.Tensor, lambda t: t.to(kind), tuple(batch)))


def plain_steps(
    job: Job,
    backend: Backend,
    steps: int,
    around: Context = contextlib.nullcontext,
    adapt: Callable[[Workload], Workload] = lambda made: made,
) -> DeviceRun:
    """Train with plain PyTorch on the device, with each step's forward pass inside `around()`;
    `adapt` changes the model first.
    """
    w, run = job.make(), DeviceRun()
    before = backend.allocated_bytes()
    w = adapt(replace(w, model=w.model.to(backend.kind)))
    model, optimizer = w.model, trained_by(job, w.model)
    torch.manual_seed(0)
    backend.reset_peak()
    for i in range(steps):
        batch = on_device(w.batch(i), backend.kind)
        backend.synchronize()
        begin = time.perf_counter()
        with around():
            result = w.loss_fn(model, *batch)
            loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        backend.synchronize()
        run.seconds = time.perf_counter() - begin
        run.losses.append(digest(loss))
        del loss, result
    run.peak_bytes, run.reserved_bytes = backend.peak_bytes() - before, reserved_peak(backend)
    run.contents = {f"parameter/{name}": digest(p) for name, p in model.named_parameters()}
    run.contents |= {f"buffer/{name}": digest(b) for name, b in model.named_buffers()}
    return run


def trained_by(job: Job, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the job's optimizer over what is trained."""
    return make_optimizer(job.optimizer, [p for p in model.parameters() if p.requires_grad])


def reserved_peak(backend: Backend) -> int:
    """Return the most bytes that the device's caching allocator took since the peak was reset; 0 if it has none."""
    count = getattr(torch.get_device_module(backend.kind), "max_memory_reserved", None)
    return 0 if count is None else int(count())


def captured(job: Job, kind: str) -> Capture:
    """Return the job's step, captured on the device.

    Afterwards constants and weights are on the host, and the device is free.
    """
    w = job.make()
    model = w.model.to(kind)
    capture = capture_step(model, w.loss_fn, trained_by(job, model), on_device(w.batch(0), kind))
    host = {k: t if isinstance(t, Fill) else _raw(t) for k, t in capture.tensors.items()}
    return Capture(capture.graphs, host, capture.optimizer, capture.layouts, capture.loss, capture.constants)


def _raw(source: torch.Tensor | Fill) -> torch.Tensor:
    if isinstance(source, Fill):
        source = torch.full(source.shape, source.value, dtype=getattr(torch, source.dtype))
    return whole_bytes(source).to("cpu", copy=True)


def planned_steps(
    job: Job,
    capture: Capture,
    program: Program,
    backend: Backend,
    folder: Path,
    steps: int,
    watchers: Mapping[int, Callable[[StepValues], None]] = MappingProxyType({}),
    *,
    shares: bool = False,
) -> DeviceRun:
    """Train by a program of the captured step on the device; page files and state are in `folder`.

    `watchers`: called once these operators of the program have run. `shares`: pages are not copied on their
    way, where memory is shared.
    """
    graph, w, run = program.graph, job.make(), DeviceRun()
    batches = [w.batch(i) for i in range(steps)]
    if capture.optimizer is None:
        raise ValueError(f"{job.name} was captured without an optimizer")
    pager = Pager(staging=None if backend.addressable else Staging(backend, BURST, shares=shares))
    sizes = {s.key: s.nbytes for s in graph.storages if s.persistent}
    devices = {s.key: s.device for s in graph.storages}
    store = StateStore(folder, sizes, pager, job=job.name)
    scratch = [Scratch(folder)]
    before = backend.allocated_bytes()
    try:
        store.create(lambda key: _chunks(_raw(capture.tensors[key]), sizes[key]), {})
        persistents = Persistents(store, capture.layouts)
        raw = {k: _raw(t) for k, t in capture.tensors.items() if k in devices and k.startswith("constant/")}
        constants = {k: placed(t, devices[k], t.numel()) for k, t in raw.items()}
        contents = StepContents(constants, persistents.resident, store)
        executor = Executor(program, contents, pager, scratch, backend, watchers)
        scalars = StepScalars(capture.optimizer)
        torch.manual_seed(0)
        persistents.prepare(program)
        backend.reset_peak()
        for batch in batches:
            persistents.prepare(program)
            backend.synchronize()
            begin = time.perf_counter()
            report = executor.run(
                [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)], scalars.advance()
            )
            backend.synchronize()
            run.seconds = time.perf_counter() - begin
            persistents.stepped(program)
            run.losses.append(digest(report.loss))
            del report
        run.peak_bytes, run.reserved_bytes = backend.peak_bytes() - before, reserved_peak(backend)
        persistents.commit(steps, {})
        run.contents = {key: digest(persistents.tensor(key)) for key in sizes}
        return run
    finally:
        pager.close()
        for file in itertools.chain(scratch):
            file.close()
        store.close()


def _chunks(flat: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    for start in range(0, nbytes, CHUNK):
        yield flat[start : min(start + CHUNK, nbytes)]
