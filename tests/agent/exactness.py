"""Train the same thing twice, with plain PyTorch and as a program under some plan, and compare every bit."""

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from port_agent.backend.base import Backend
from port_agent.backend.raw_bytes import placed, whole_bytes
from port_agent.backend.staging import Staging
from port_agent.packing import Layout, largest_bytes
from port_agent.paging.pager import BURST, CHUNK, Pager
from port_agent.training.executor import Executor, StepContents
from port_agent.training.state.checkpoint import StateStore
from port_agent.training.state.resident_state import Persistents
from port_agent.training.step_paging import Scratch
from port_planner.capture.step import Capture, Fill, capture_step
from port_planner.ir.costs import Codec, CostTable, DeviceCosts, Flash, OpCost, PackingCost, by_version
from port_planner.ir.graph import Role, StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.lowering.optimizer_scalars import StepScalars, hyperparameters
from port_planner.ir.lowering.packables import Packable, packables, read_packed
from port_planner.ir.lowering.rematerialize import effective_operands, rematerializable
from port_planner.ir.lowering.update_slices import update_groups
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import PlanError, Program, idle_gaps

torch.set_num_threads(1)

MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def flat_costs(graph: StepGraph, *, base: int = 0, workspace: int = 0) -> CostTable:
    """Return costs under which every op takes 0.1 ms, on a slow SD card, and whatever can be packed may be."""
    flash = Flash("card", 1e8, 5e7, 1e-4, 1e-9, 1e-9)
    ops = tuple(OpCost(1e-4, workspace, 1e-4) for _ in graph.ops)
    return CostTable(DeviceCosts("test", base, 1.0, 1.0, flash), ops, packing_costs(graph))


def packing_costs(graph: StepGraph) -> tuple[PackingCost, ...]:
    """Return costs under which whatever can be packed may be; every third contents that may be
    sparse get too little room.
    """
    return tuple(
        PackingCost(
            p.storage,
            p.version,
            p.codec,
            p.item_bytes,
            0.5,
            _reserved(graph.storages[p.storage].nbytes, p),
            1e-5,
            1e-5,
            1e-5,
        )
        for p in packables(graph)
    )


def _reserved(nbytes: int, packable: Packable) -> int:
    most = largest_bytes(Layout(packable.codec, nbytes // packable.item_bytes, packable.item_bytes))
    short = packable.codec is Codec.BITMAP and packable.storage % 3 == 0
    return most // 4 if short else most


def random_plan(
    graph: StepGraph, seed: int, *, page: float = 0.3, recompute: float = 0.3, slices: float = 0.5, pack: float = 0.0
) -> Plan:
    """Return a valid plan made of random decisions of every kind."""
    rng = random.Random(seed)
    costs = flat_costs(graph)
    groups = update_groups(graph)
    sliced = tuple((i, rng.choice([2, 3])) for i in range(len(groups)) if rng.random() < slices)
    packable = by_version(costs.packings)
    chosen: list[Decision] = []
    recomputed: list[Decision] = []
    for s, storage in enumerate(graph.storages):
        if not graph.uses[s] or s in graph.kept:
            continue
        for a, b in idle_gaps(graph, s):
            if any(groups[g].first <= a and b <= groups[g].last for g, _ in sliced):
                continue
            if rng.random() < page:
                chosen.append(Decision(s, a, b, Action.PAGE))
            elif rng.random() < recompute and rematerializable(graph, s, a):
                recomputed.append(Decision(s, a, b, Action.RECOMPUTE))
            elif rng.random() < pack and (s, sum(w <= a for w in graph.writers[s])) in packable:
                codec = packable[s, sum(w <= a for w in graph.writers[s])].codec
                away = codec.comes_back and rng.random() < 0.5
                chosen.append(Decision(s, a, b, Action.PACK_PAGE if away else Action.PACK))
                if not away and read_packed(graph, s, a, codec):
                    break  # it does not come back
        if storage.persistent and rng.random() < 2 * page:
            chosen.append(Decision(s, graph.uses[s][-1], graph.uses[s][0], Action.PAGE))
    return _with_those_that_fit(graph, costs, chosen, recomputed, sliced)


def _with_those_that_fit(
    graph: StepGraph,
    costs: CostTable,
    chosen: list[Decision],
    recomputed: list[Decision],
    sliced: tuple[tuple[int, int], ...],
) -> Plan:
    """Add each recomputation whose inputs are there when it runs, or can be made again for it; halve what fails
    until single ones are left.
    """

    def add(candidates: list[Decision]) -> None:
        if not candidates:
            return
        try:
            lower(graph, costs, Plan(tuple(chosen + candidates), sliced=sliced))
            chosen.extend(candidates)
        except PlanError:
            if len(candidates) > 1:
                half = len(candidates) // 2
                add(candidates[:half])
                add(candidates[half:])
            elif candidates[0].action is Action.RECOMPUTE:
                with_inputs = _made_for(graph, candidates[0], chosen)
                if len(with_inputs) > 1 and not {(d.storage, d.before) for d in with_inputs} & {
                    (d.storage, d.before) for d in chosen
                }:
                    try:
                        lower(graph, costs, Plan(tuple(chosen + with_inputs), sliced=sliced))
                        chosen.extend(with_inputs)
                    except PlanError:
                        pass

    add(recomputed)
    return Plan(tuple(chosen), sliced=sliced)


def _made_for(graph: StepGraph, d: Decision, chosen: Iterable[Decision]) -> list[Decision]:
    """Return a recomputation with all that is away at its time as intermediates, what those read included."""
    gaps = [c for c in chosen if c.action is not Action.INTERMEDIATE and c.after < d.before]
    open_gaps = {c.storage for c in gaps if not c.after < c.before < d.before}
    made, todo = {d.storage: d}, [d]
    while todo:
        one = todo.pop()
        for u in {u for w in graph.writers[one.storage] if w <= one.after for u in effective_operands(graph, w)}:
            before = [use for use in graph.uses[u] if use < d.before]
            gone = u in open_gaps or (graph.storages[u].role is Role.TEMPORARY and graph.uses[u][-1] < d.before)
            if u not in made and before and gone and rematerializable(graph, u, before[-1]):
                made[u] = Decision(u, before[-1], d.before, Action.INTERMEDIATE)
                todo.append(made[u])
    return list(made.values())


@dataclass
class Outcome:
    """Losses, and by key the bits of everything that outlives a step."""

    losses: list[torch.Tensor]
    contents: dict[str, torch.Tensor]
    aux: list[Any] = field(default_factory=list)


def plain(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    make: MakeOptimizer,
    batches: Sequence[tuple[torch.Tensor, ...]],
    *,
    seed: int = 0,
    schedule: MakeScheduler | None = None,
    clip: float | None = None,
    accumulate: int = 1,
) -> Outcome:
    """Train a copy of `model` with plain PyTorch."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    scheduler = schedule(optimizer) if schedule else None
    torch.manual_seed(seed)
    losses = []
    for i, batch in enumerate(batches):
        result = loss_fn(model, *batch)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        losses.append(loss.detach().clone())
        if (i + 1) % accumulate == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=False)
            optimizer.step()
            if scheduler:
                scheduler.step()
            optimizer.zero_grad()
    return Outcome(losses, contents_of(model, optimizer))


def contents_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return weights, buffers and optimizer state by storage key."""
    found = {f"parameter/{n}": p.detach() for n, p in model.named_parameters()}
    found |= {f"buffer/{n}": b.detach() for n, b in model.named_buffers()}
    for name, parameter in model.named_parameters():
        for what, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"state/{name}/{what}"] = value.detach()
    return found


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's values as bytes: equal bytes are equal bits, the sign of zero included."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def planned(
    capture: Capture,
    plans: dict[str, Plan],
    batches: Sequence[tuple[torch.Tensor, ...]],
    folder: Path,
    *,
    seed: int = 0,
    make: MakeOptimizer | None = None,
    schedule: MakeScheduler | None = None,
    accumulate: int = 1,
    costs: dict[str, CostTable] | None = None,
    check_budget: bool = True,
    scratch_dirs: Sequence[Path] = (),
    backend: Backend | None = None,
    shares: bool = False,
) -> Outcome:
    """Train from the capture's contents under `plans` (by graph), committing after every other step.

    `backend`: where; the step must have been captured there. `shares`: pages are not copied where memory is shared.
    """
    programs = {
        name: lower(graph, costs[name] if costs else flat_costs(graph), plans[name], check_budget=check_budget)
        for name, graph in capture.graphs.items()
    }
    pager = Pager(staging=Staging(backend, BURST, shares=shares) if backend is not None else None)
    devices = {s.key: s.device for g in capture.graphs.values() for s in g.storages}
    sizes = {s.key: s.nbytes for g in capture.graphs.values() for s in g.storages if s.persistent}
    store = StateStore(folder, sizes, pager, job="test")
    scratch = {name: tuple(map(Scratch, (folder, *scratch_dirs))) for name in programs}
    try:
        store.create(lambda key: chunks(capture.tensors[key], sizes[key]), {})
        persistents = Persistents(store, capture.layouts)
        raw = {k: _raw(t) for k, t in capture.tensors.items() if k in devices and k.startswith("constant/")}
        constants = {k: placed(t, devices[k], t.numel()) for k, t in raw.items()}
        contents = StepContents(constants, persistents.resident, store, persistents.dirty)
        executors = {
            name: Executor(program, contents, pager, scratch[name], backend) for name, program in programs.items()
        }
        return _steps(capture, programs, executors, persistents, batches, seed, make, schedule, accumulate)
    finally:
        pager.close()
        for file in itertools.chain(*scratch.values()):
            file.close()
        store.close()


def _steps(
    capture: Capture,
    programs: dict[str, Program],
    executors: dict[str, Executor],
    persistents: Persistents,
    batches: Sequence[tuple[torch.Tensor, ...]],
    seed: int,
    make: MakeOptimizer | None,
    schedule: MakeScheduler | None,
    accumulate: int,
) -> Outcome:
    assert capture.optimizer is not None
    scalars = StepScalars(capture.optimizer, tabulated(make, schedule, len(batches)) if make and schedule else ())
    torch.manual_seed(seed)
    losses, aux = [], []
    for i, batch in enumerate(batches):
        place = i % accumulate
        last = place == accumulate - 1
        name = "step" if accumulate == 1 else "first" if place == 0 else "last" if last else "next"
        numbers: list[float | int] = []
        if last:
            numbers = scalars.advance()
        persistents.prepare(programs[name])
        report = executors[name].run([t for t in batch if isinstance(t, torch.Tensor)], numbers)
        persistents.stepped(programs[name])
        if i % 2:
            persistents.commit(i + 1, {})
        losses.append(report.loss)
        aux.append(report.aux)
    kept = [k for k in persistents.store.sizes if not k.startswith("gradient/")]
    return Outcome(losses, {k: persistents.tensor(k).to("cpu", copy=True) for k in kept}, aux)


def tabulated(make: MakeOptimizer, schedule: MakeScheduler, updates: int) -> list[list[dict[str, Any]]]:
    """Return the hyperparameters of every group for so many updates."""
    shadow = make([torch.nn.Parameter(torch.zeros(1))])
    scheduler = schedule(shadow)
    rows = []
    for _ in range(updates):
        rows.append([hyperparameters(group) for group in shadow.param_groups])
        shadow.step()  # changes nothing without gradients; the scheduler wants to have seen it
        scheduler.step()
    return rows


def chunks(source: torch.Tensor | Fill, nbytes: int) -> Iterator[torch.Tensor]:
    """Yield the bytes that a storage starts from."""
    flat = _raw(source)
    assert flat.numel() == nbytes
    for start in range(0, nbytes, CHUNK):
        yield flat[start : start + CHUNK].clone()


def _raw(source: torch.Tensor | Fill) -> torch.Tensor:
    if isinstance(source, Fill):
        source = torch.full(source.shape, source.value, dtype=getattr(torch, source.dtype))
    return whole_bytes(source).to("cpu", copy=True)


def differences(expected: Outcome, actual: Outcome) -> list[str]:
    """Name everything that differs in any bit."""
    found = [
        f"loss of step {i + 1}: {a.item()!r} instead of {e.item()!r}"
        for i, (e, a) in enumerate(zip(expected.losses, actual.losses, strict=True))
        if bits(e) != bits(a)
    ]
    missing = [k for k in expected.contents if k.startswith("parameter/") and k not in actual.contents]
    wrong = [k for k, t in actual.contents.items() if bits(t) != bits(expected.contents[k])]
    return found + [f"{k} is missing" for k in missing] + [f"{k} differs" for k in wrong]


def compare(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    make: MakeOptimizer,
    batches: Sequence[tuple[torch.Tensor, ...]],
    folder: Path,
    seeds: Iterable[int],
) -> None:
    """Compare plain training with random plans (seed 0: keep everything); fail with what differs."""
    expected = plain(model, loss_fn, make, batches)
    capture = capture_step(model, loss_fn, make(model.parameters()), batches[0])
    for seed in seeds:
        plan = random_plan(capture.graphs["step"], seed, pack=0.3) if seed else Plan()
        place = folder / f"plan{seed}"
        actual = planned(capture, {"step": plan}, batches, place)
        assert not differences(expected, actual), (seed, differences(expected, actual)[:8])
