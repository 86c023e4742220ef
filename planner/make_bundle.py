"""Build a bundle: capture every graph a job needs, profile, plan, write."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from planner.capture.step import Capture, Fill, capture_evaluation, capture_step
from planner.ir.bundle.bundle import (
    NO_LIMITS,
    WHOLE_UPDATE,
    Manifest,
    PlanChoice,
    PlannedLimits,
    Recordings,
    Reference,
    TensorLayout,
)
from planner.ir.bundle.codec import MAX_WHOLE
from planner.ir.bundle.data_order import batch_rows, epoch_order
from planner.ir.bundle.safetensors_io import STORED_DTYPES, Chunks
from planner.ir.bundle.writer import Contents, write_bundle
from planner.ir.costs import CostTable, DeviceCosts
from planner.ir.devices.kinds import CPU
from planner.ir.errors import CaptureError, ExitCode, PortError
from planner.ir.graph import Phase, Role, StepGraph, storage_key
from planner.ir.lowering import optimizer_scalars
from planner.ir.lowering.lower import lower
from planner.ir.operand_rules import verify_operands
from planner.ir.operators import check_operator
from planner.ir.plan import Plan
from planner.ir.tensor_bytes import storage_pieces, tensor_pieces
from planner.job import JobError, TrainingJob, own_code
from planner.profiling.operators import Measured
from planner.search.plan_problem import PlanProblem
from planner.search.plan_step import PlanResult

MOST_SEARCHED = 6_000
"""Operators of a step that is searched: of more (GPT-2's update over eight micro-batches has 14,000) one look at the planning model
takes longer than the whole time for planning, and in that of a minute found nothing better than the first plan."""

_RANDOM: tuple[str, ...] = ("torch's random numbers",)
_ROWS_AND_RANDOM = ("the rows of the batch", *_RANDOM)


class InfeasibleError(PortError):
    """No plan fits the budgets.

    `needed_bytes`: the smallest RAM budget that would do; `fastest_seconds`: where only the deadline is too short, what
    the fastest plan takes per step.
    """

    exit_code = ExitCode.IMPOSSIBLE

    def __init__(self, message: str, needed_bytes: int | None, fastest_seconds: float | None = None) -> None:
        super().__init__(message)
        self.needed_bytes, self.fastest_seconds = needed_bytes, fastest_seconds


@dataclass(frozen=True)
class Prepared:
    """A captured job: graphs by name, initial tensors, data columns."""

    job: TrainingJob
    graphs: Mapping[str, StepGraph]
    tensors: Mapping[str, torch.Tensor | Fill]
    layouts: Mapping[str, TensorLayout]
    optimizer: optimizer_scalars.OptimizerSpec
    data: Sequence[torch.Tensor]
    eval_data: Sequence[torch.Tensor]
    result: tuple[str, ...]
    unused: Mapping[str, torch.Tensor]
    """Tensors of the result that no graph uses."""
    schedule: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    recordings: Recordings = field(default_factory=Recordings)
    reference: Reference = field(default_factory=Reference)

    @property
    def initial_tensors(self) -> tuple[torch.Tensor, ...]:
        """What training begins from, but for what is filled with one number."""
        return tuple(tensor for tensor in self.tensors.values() if isinstance(tensor, torch.Tensor))


# -- capture


def rows_and_updates(job: TrainingJob, epochs: int) -> tuple[int, int]:
    """Return how many samples a job has, and how many updates so many passes over them make.

    Raises JobError.
    """
    rows = _checked_data(job)[0].shape[0]
    return rows, epochs * -(-rows // job.batch_size) // job.accumulate


def _checked_data(job: TrainingJob) -> list[torch.Tensor]:
    """Return the columns of a job's data; raise JobError for settings or data that cannot be trained on."""
    _check_settings(job)
    data = _columns(job.data, "data")
    if not data:
        raise JobError("the job has no data; give one tensor per argument of the batch")
    count = data[0].shape[0]
    if not 1 <= job.batch_size <= count:
        remedy = f"choose between 1 and {count}" if count else "give at least one"
        raise JobError(f"batch_size is {job.batch_size}, the data has {count} rows; {remedy}")
    return data


def prepare(job: TrainingJob, *, updates: int = 0) -> Prepared:
    """Capture every graph that the job's data will need: full batches, the last short one, evaluation.

    Each is recorded several times, on other rows. `updates`: for how many updates the scheduler's hyperparameters are
    tabulated. Raises CaptureError for a step that cannot be recorded or is not the same each time, GraphError for one whose
    operators a bundle may not call that way, JobError for data or settings that cannot be trained on.
    """
    data, eval_data = _checked_data(job), _columns(job.eval_data, "eval_data")
    count = data[0].shape[0]
    loss_fn = _told(job.loss_fn)
    graphs: dict[str, StepGraph] = {}
    captures: list[Capture] = []
    count_recorded, varied = 1, _RANDOM
    for rows in _batch_sizes(count, job.batch_size, job.drop_last):
        others = _other_batches(data, rows, job.seed)
        count_recorded = 1 + len(others)
        varied = _ROWS_AND_RANDOM if rows == job.batch_size and _differ(data, rows, others) else varied
        capture = capture_step(
            job.model, loss_fn, job.optimizer, tuple(c[:rows] for c in data),
            clip_grad_norm=job.clip_grad_norm, accumulate=job.accumulate, others=others,
        )  # fmt: skip
        graphs |= {_graph_name(k, rows, job.batch_size): g for k, g in capture.graphs.items()}
        captures.append(capture)
        if not job.allow_nonfinite and not math.isfinite(capture.loss):
            raise JobError(
                f"the loss on the first {rows} rows of the data is {capture.loss}; look for values in the data, the model "
                "or its start that are not finite, or set allow_nonfinite=True in the job"
            )
    if eval_data:
        for rows in _batch_sizes(eval_data[0].shape[0], job.batch_size, drop_last=False):
            others = _other_batches(eval_data, rows, job.seed)
            capture = capture_evaluation(job.model, loss_fn, tuple(c[:rows] for c in eval_data), others=others)
            graphs[_graph_name("eval", rows, job.batch_size)] = capture.graphs["eval"]
            captures.append(capture)
    for graph in graphs.values():
        if graph.device != CPU:
            raise CaptureError(
                f"the model lies on {graph.device}: what its step costs there and how much memory it has is not measured yet; "
                "move the model to the CPU"
            )
        for op in graph.ops:
            check_operator(op.name)
        verify_operands(graph)
    graphs, tensors = _merge(captures, graphs)
    spec = captures[0].optimizer
    if spec is None:
        raise CaptureError("the step has no optimizer")
    layouts: dict[str, TensorLayout] = {}
    for capture in captures:
        layouts |= {k: v for k, v in capture.layouts.items() if k not in layouts}
    used = {s.key for g in graphs.values() for s in g.storages if s.persistent}
    constants = tuple(dict.fromkeys(c for capture in captures for c in capture.constants))
    result, unused = _result(job.model, used)
    return Prepared(
        job, graphs, {k: t for k, t in tensors.items() if k in used or k.startswith("constant/")},
        {k: v for k, v in layouts.items() if k in used}, spec, data, eval_data, result, unused,
        _schedule(job, updates), Recordings(count_recorded, varied, constants),
    )  # fmt: skip


def _result(model: torch.nn.Module, used: Set[str]) -> tuple[tuple[str, ...], dict[str, torch.Tensor]]:
    """Return the names of the model's state, and its tensors that are not `used`.

    Tied tensors are named once, as safetensors' `save_model` does.
    """
    state = {k: t for k, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    distinct = {id(t): name for name, t in reversed(state.items())}
    distinct |= {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers()) if n in state}
    names = tuple(sorted(distinct.values()))
    keys = {n: {storage_key(Role.PARAMETER, n), storage_key(Role.BUFFER, n)} for n in names}
    return names, {n: state[n].detach() for n in names if not keys[n] & used}


def _check_settings(job: TrainingJob) -> None:
    """Raise JobError for what no bundle can be made of, before anything takes time."""
    for name, kind in (("model", torch.nn.Module), ("optimizer", torch.optim.Optimizer)):
        if not isinstance(getattr(job, name), kind):
            raise JobError(
                f"the {name} is a {type(getattr(job, name)).__name__}; give a {kind.__module__}.{kind.__name__}"
            )
    if not callable(job.loss_fn):
        raise JobError(f"loss_fn is a {type(job.loss_fn).__name__}; give a function of the model and a batch")
    clip = job.clip_grad_norm
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < math.inf):
        raise JobError(f"clip_grad_norm is {clip!r}; it must be a number above 0, or None")
    for name, least in (("batch_size", 1), ("accumulate", 1), ("seed", 0)):
        value = getattr(job, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MAX_WHOLE:
            raise JobError(f"{name} is {value!r}; it must be a whole number, at least {least} and below 2**62")
    if isinstance(job.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise JobError(
            "ReduceLROnPlateau follows a metric, and a bundle's schedule is fixed when it is made; use a scheduler that "
            "depends on the number of steps alone"
        )
    if job.scheduler is not None and not isinstance(job.scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise JobError(
            f"the scheduler is a {type(job.scheduler).__name__}; give one of torch.optim.lr_scheduler, or None"
        )


def _told(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function whose errors say on which batch, with the user's own lines."""

    def told(model: torch.nn.Module, *batch: torch.Tensor) -> Any:
        columns = ", ".join(f"{str(c.dtype).removeprefix('torch.')} {list(c.shape)}" for c in batch)
        with own_code(f"loss_fn(model, *batch) on a batch of {columns}"):
            return loss_fn(model, *batch)

    return told


def _columns(data: Sequence[Any], what: str) -> list[torch.Tensor]:
    if isinstance(data, str) or not isinstance(data, Sequence):
        raise JobError(f"{what} is a {type(data).__name__}; give a list with one tensor per argument of the batch")
    columns = []
    for i, column in enumerate(data):
        try:
            columns.append(torch.as_tensor(column))
        except (TypeError, ValueError, RuntimeError) as error:
            raise JobError(
                f"column {i} of {what} is no array of numbers ({error}); give a tensor or an array"
            ) from error
        kind = str(columns[-1].dtype).removeprefix("torch.")
        if kind not in STORED_DTYPES:
            raise JobError(f"column {i} of {what} is {kind}; give one of {', '.join(STORED_DTYPES)}")
        if not columns[-1].dim():
            raise JobError(f"column {i} of {what} is a single number; give a tensor with one row per sample")
    lengths = {c.shape[0] for c in columns}
    if len(lengths) > 1:
        raise JobError(
            f"the columns of {what} have different lengths {sorted(lengths)}; they must have one row per sample"
        )
    return [c.detach().contiguous() for c in columns]


def _batch_sizes(count: int, size: int, drop_last: bool) -> list[int]:
    rest = count % size
    sizes = [size] if count >= size else []
    return sizes + ([rest] if rest and not drop_last else [])


def _other_batches(data: Sequence[torch.Tensor], rows: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Return batches of rows from all over the data."""
    order = epoch_order(seed, 0, data[0].shape[0])
    return [tuple(c[chosen] for c in data) for chosen in (order[:rows], order[-rows:])]


def _differ(data: Sequence[torch.Tensor], rows: int, others: Sequence[tuple[torch.Tensor, ...]]) -> bool:
    """Tell whether in every column some batch has other contents than the first rows."""
    return all(any(not torch.equal(c[:rows], other[i]) for other in others) for i, c in enumerate(data))


def _graph_name(kind: str, rows: int, batch_size: int) -> str:
    return kind if rows == batch_size else f"{kind}@{rows}"


def _merge(
    captures: Sequence[Capture], graphs: dict[str, StepGraph]
) -> tuple[dict[str, StepGraph], dict[str, torch.Tensor | Fill]]:
    """Give the constants of each capture names of their own.

    So all graphs can share one table of tensors.
    """
    tensors: dict[str, torch.Tensor | Fill] = {}
    renamed: dict[int, StepGraph] = {}
    for i, capture in enumerate(captures):
        for key, tensor in capture.tensors.items():
            if key.startswith("constant/"):
                tensors[f"{key}.{i}"] = tensor
            else:
                tensors.setdefault(key, tensor)
        for graph in capture.graphs.values():
            storages = tuple(
                replace(s, name=f"{s.name}.{i}") if s.key in capture.tensors and s.key.startswith("constant/") else s
                for s in graph.storages
            )
            renamed[id(graph)] = replace(graph, storages=storages)
    return {name: renamed[id(g)] for name, g in graphs.items()}, tensors


def _schedule(job: TrainingJob, updates: int) -> tuple[tuple[Mapping[str, Any], ...], ...]:
    """Tabulate the hyperparameters that the scheduler changes.

    Optimizer and scheduler are put back afterwards.
    """
    if job.scheduler is None:
        return ()
    optimizer, scheduler = job.optimizer, job.scheduler
    before = [dict(g) for g in optimizer.param_groups]
    state = copy.deepcopy(scheduler.state_dict())
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or the scheduler warns that no step was made
    rows = []
    for _ in range(max(1, updates)):
        rows.append([optimizer_scalars.hyperparameters(g) for g in optimizer.param_groups])
        scheduler.step()
    for group, old in zip(optimizer.param_groups, before, strict=True):
        group.update(old)
    scheduler.load_state_dict(state)
    changing = [{k for row in rows for k in row[g] if row[g][k] != rows[0][g][k]} for g in range(len(before))]
    return tuple(tuple({k: row[g][k] for k in sorted(changing[g])} for g in range(len(before))) for row in rows)


def plain_losses(job: TrainingJob, data: Sequence[torch.Tensor], steps: int) -> Iterator[float]:
    """Train with plain PyTorch exactly as a bundle of this job would, yielding the loss of each batch."""
    torch.manual_seed(job.seed)
    parameters = [p for g in job.optimizer.param_groups for p in g["params"]]
    batches = batch_rows(job.seed, data[0].shape[0], job.batch_size, drop_last=job.drop_last)
    for step, (_, rows) in zip(range(steps), batches, strict=False):
        result = job.loss_fn(job.model, *(c[rows] for c in data))
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        if (step + 1) % job.accumulate == 0:
            if job.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, job.clip_grad_norm, foreach=False)
            job.optimizer.step()
            if job.scheduler is not None:
                job.scheduler.step()
            job.optimizer.zero_grad()
        yield float(loss.detach())


# -- plan


Planner = Callable[[StepGraph, CostTable, int], PlanResult]


def plan_all(
    prepared: Prepared, measured: Measured, device: DeviceCosts, ram_bytes: int, planner: Planner
) -> tuple[dict[str, Plan], dict[str, CostTable]]:
    """Return a plan and a cost table for every graph.

    Raises InfeasibleError for the first that does not fit.
    """
    plans, costs = {}, {}
    for (name, graph), table in zip(prepared.graphs.items(), measured.tables(device), strict=True):
        costs[name] = table
        result = planner(graph, table, ram_bytes)
        if result.plan is None:
            raise InfeasibleError(f"graph {name!r}: {result.message}", result.needed_bytes, result.fastest_seconds)
        plans[name] = result.plan
    return plans, costs


def default_planner(
    *,
    strategy: str,
    time_limit_s: float,
    progress: Any = None,
    limits: PlannedLimits = NO_LIMITS,
) -> Planner:
    """Return the planner that the command line uses, for plans within `limits`; evaluation has no deadline."""

    def plan(graph: StepGraph, costs: CostTable, ram_bytes: int) -> PlanResult:
        return plan_problem(graph, costs, ram_bytes, strategy, time_limit_s, limits).solved(progress)

    return plan


def plan_problem(
    graph: StepGraph, costs: CostTable, ram_bytes: int, strategy: str, time_limit_s: float, limits: PlannedLimits
) -> PlanProblem:
    """Return what the default planner solves for a graph."""
    training = any(op.phase is not Phase.FORWARD for op in graph.ops)
    searched = strategy if len(graph.ops) <= MOST_SEARCHED else "greedy"
    return PlanProblem(
        graph, costs, ram_bytes, limits.step_s if training else None, limits.written_bytes, time_limit_s, searched
    )


def choice(ram_bytes: int, plans: Mapping[str, Plan], costs: Mapping[str, CostTable], prepared: Prepared) -> PlanChoice:
    """Return what the manifest says about one plan per graph; figures are those of a batch of full size, on average."""
    counts = full_batches(prepared)
    total = prepared.job.accumulate if WHOLE_UPDATE in counts else sum(counts.values())
    programs = {name: lower(prepared.graphs[name], costs[name], plans[name]) for name in counts}

    def a_batch(figure: Callable[[str], float]) -> float:
        return sum(count * figure(name) for name, count in counts.items()) / total

    bounds = [plans[name].bound_joules for name in counts]
    peak = max(p.peak_bytes for p in plans.values())
    return PlanChoice(
        ram_bytes, peak, a_batch(lambda name: programs[name].seconds), a_batch(lambda name: programs[name].joules),
        a_batch(lambda name: plans[name].overhead_joules),
        None if None in bounds else a_batch(lambda name: plans[name].bound_joules or 0.0),
        round(a_batch(lambda name: programs[name].written_bytes)), plans[next(iter(counts))].strategy,
        a_batch(lambda name: programs[name].wear_joules),
    )  # fmt: skip


def full_batches(prepared: Prepared) -> dict[str, int]:
    """Return which graphs an update of full batches runs, and how often; a whole one stands for all its batches."""
    graphs, count = prepared.graphs, prepared.job.accumulate
    if WHOLE_UPDATE in graphs or count == 1 or "last" not in graphs:
        main = WHOLE_UPDATE if WHOLE_UPDATE in graphs else next(iter(graphs))
        return {main: 1}
    return {name: often for name, often in (("first", 1), ("next", count - 2), ("last", 1)) if often}


# -- write


def write(
    path: Path,
    prepared: Prepared,
    plans: Sequence[Mapping[str, Plan]],
    costs: Mapping[str, CostTable],
    budgets: Sequence[int],
    *,
    threads: int,
    estimated: bool = False,
    limits: PlannedLimits = NO_LIMITS,
) -> Manifest:
    """Write the bundle and return its manifest; raise BundleError where it cannot be written."""
    manifest = describe(prepared, plans, costs, budgets, threads=threads, estimated=estimated, limits=limits)
    tensors = {k: _storage_chunks(t) for k, t in prepared.tensors.items() if isinstance(t, torch.Tensor)}
    tensors |= {f"unused/{k}": tensor_chunks(t.contiguous()) for k, t in prepared.unused.items()}
    data = {f"train/{i}": tensor_chunks(c) for i, c in enumerate(prepared.data)}
    data |= {f"eval/{i}": tensor_chunks(c) for i, c in enumerate(prepared.eval_data)}
    write_bundle(path, Contents(manifest, prepared.graphs, costs, plans, tensors, data))
    return manifest


def describe(
    prepared: Prepared,
    plans: Sequence[Mapping[str, Plan]],
    costs: Mapping[str, CostTable],
    budgets: Sequence[int],
    *,
    threads: int,
    estimated: bool = False,
    limits: PlannedLimits = NO_LIMITS,
) -> Manifest:
    """Return the manifest of a bundle with these plans, made to keep to `limits`. `estimated`: the costs are another board's."""
    job = prepared.job
    first = prepared.graphs[next(iter(prepared.graphs))]
    batch = tuple(TensorLayout(v.dtype, v.shape, v.stride, v.offset) for v in (first.values[b] for b in first.batch))
    device = next(iter(costs.values())).device
    return Manifest(
        name=job.name, torch=torch.__version__, threads=threads, seed=job.seed, batch_size=job.batch_size,
        accumulate=job.accumulate, samples=prepared.data[0].shape[0], drop_last=job.drop_last,
        graphs=tuple(prepared.graphs), batch=batch,
        plans=tuple(choice(b, p, costs, prepared) for b, p in zip(budgets, plans, strict=True)),
        optimizer={"name": prepared.optimizer.name, "groups": [dict(g) for g in prepared.optimizer.groups]},
        layouts=prepared.layouts,
        fills={k: t.value for k, t in prepared.tensors.items() if isinstance(t, Fill)},
        result=prepared.result,
        device=device.name, estimated=estimated,
        eval_samples=prepared.eval_data[0].shape[0] if prepared.eval_data else 0,
        schedule=prepared.schedule, allow_nonfinite=job.allow_nonfinite, reference=prepared.reference,
        recordings=prepared.recordings, limits=limits, device_kind=first.device,
    )  # fmt: skip


def _storage_chunks(tensor: torch.Tensor) -> Chunks:
    """A storage's raw bytes."""
    return Chunks("uint8", (tensor.untyped_storage().nbytes(),), lambda: storage_pieces(tensor))


def tensor_chunks(tensor: torch.Tensor) -> Chunks:
    """Return a contiguous tensor for writing."""
    return Chunks(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), lambda: tensor_pieces(tensor))
