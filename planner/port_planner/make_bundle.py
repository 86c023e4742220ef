"""Build a bundle: capture every graph a job needs, profile, plan, write."""

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from port_planner.base.errors import CaptureError, ExitCode, PortError, StatefulStepError
from port_planner.base.tensor_bytes import chunks_of_tensor, storage_chunks
from port_planner.base.units import size_at_least
from port_planner.capture.cross_step_state import StepResults
from port_planner.capture.recorder import Tape
from port_planner.capture.step import Capture, Fill, Repetition, capture_evaluation, capture_step
from port_planner.column_file import Column, ColumnFile
from port_planner.exactness.applied_arithmetic import unchanged_arithmetic
from port_planner.ir.allowed_operators import check_operator
from port_planner.ir.bundle.data_order import epoch_order
from port_planner.ir.bundle.manifest import (
    NO_LIMITS,
    BucketSize,
    ExpectedResults,
    FileRange,
    Manifest,
    PlainRun,
    PlannedLimits,
    ProximalTerm,
    Recordings,
    TensorLayout,
    WeightBlocks,
    graph_name,
    kind_of_graph,
    train_part,
)
from port_planner.ir.bundle.safetensors_io import STORED_DTYPES, Chunks
from port_planner.ir.bundle.writer import Contents, write_bundle
from port_planner.ir.costs import CostTable, DeviceCosts
from port_planner.ir.devices.cpu_teams import CpuTeam
from port_planner.ir.graph import Phase, Role, StepGraph, computed_bytes, storage_key, structure
from port_planner.ir.known_steps import KnownSteps
from port_planner.ir.lowering import optimizer_scalars
from port_planner.ir.operands.verify import verify_operands
from port_planner.ir.plan import Plan
from port_planner.ir.spelled_schedule import SpelledSchedule
from port_planner.job import JobError, TrainingJob, own_code
from port_planner.job_checks import JobSamples, checked_columns, checked_samples
from port_planner.job_device import kind_of_job, on_device
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.proximal import kept_starts
from port_planner.schedules import Schedule, plateau_of, spelled, tabulated
from port_planner.search import clock
from port_planner.search.pareto import choice_of
from port_planner.search.plan_problem import plan_problem
from port_planner.search.plan_step import PlanResult
from port_planner.search.transferred import transferred
from port_planner.tiling.blocks import COLUMNS, ROWS, Block, Blocks

Ahead = Callable[[int, SpelledSchedule], KnownSteps]
"""Runs a job's program alone, from its beginning, for that many updates; the given schedule is expected."""
_RANDOM: tuple[str, ...] = ("torch's random numbers",)
_MAX_NAMED = 3
_TABULATED_EPOCHS, _MAX_TABULATED = 10, 4000
"""Limits of a schedule's table beyond the requested epochs, so that longer training needs no new bundle."""
_NEIGHBOUR_S = 1.0
"""Maximum seconds of planning for the graph of a further shape."""
_ROWS_AND_RANDOM = ("the rows of the batch", *_RANDOM)


class InfeasibleError(PortError):
    """No plan fits the budgets.

    `needed_bytes`: the smallest RAM budget that would do, which `option` gives; `is_tried`: whether a trial kept within it; `remedy`: what else would help; `fastest_seconds`: seconds per step of the fastest plan, if only the deadline is too short; `base_bytes`: what a trial
    before found the worker to hold besides the step, where that leaves room for one; `held_bytes`: the same, of a trial with more memory; `left_whole`: what takes more memory for it gave other
    bits in tiles, and where that showed.
    """

    exit_code = ExitCode.IMPOSSIBLE

    def __init__(
        self,
        message: str,
        needed_bytes: int | None,
        fastest_seconds: float | None = None,
        *,
        option: str = "--ram",
        remedy: str = "",
    ) -> None:
        super().__init__(message)
        self.needed_bytes, self.fastest_seconds = needed_bytes, fastest_seconds
        self.option, self.remedy, self.is_tried = option, remedy, False
        self.base_bytes: int | None = None
        self.held_bytes: int | None = None
        self.left_whole: tuple[str, ...] = ()

    def found_more_than(self, device: DeviceCosts) -> bool:
        """Return whether a trial found that the worker holds more besides the step than `device` says, and the budget leaves room for
        one.
        """
        return self.base_bytes is not None and self.base_bytes > device.base_bytes

    def __str__(self) -> str:
        """Return the message, the remedy, and the chains that stay whole."""
        advice = [self.remedy] * bool(self.remedy)
        if self.needed_bytes is not None:
            least = "" if self.is_tried else "at least "
            kept = ", within which a trial of it kept" if self.is_tried else ""
            advice.insert(0, f"raise {self.option} to {least}{size_at_least(self.needed_bytes)}{kept}")
        text = "; ".join([super().__str__(), ", or ".join(advice)][: 1 + bool(advice)])
        reasons = [*dict.fromkeys(self.left_whole)]
        if not reasons:
            return text
        more = f"; and {len(reasons) - _MAX_NAMED} more" if len(reasons) > _MAX_NAMED else ""
        return f"{text}. Not tiled, because tiles give different bits here: {'; '.join(reasons[:_MAX_NAMED])}{more}"


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A storage's contents that are part of a larger tensor, in row-major order; not copied until they are written."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class CapturedJob:
    """A captured job: graphs by name, initial tensors, columns of data."""

    job: TrainingJob
    graphs: Mapping[str, StepGraph]
    tensors: Mapping[str, torch.Tensor | Fill | TensorSlice]
    layouts: Mapping[str, TensorLayout]
    optimizer: optimizer_scalars.OptimizerSpec
    data: Sequence[Column]
    eval_data: Sequence[Column]
    result: tuple[str, ...]
    unused: Mapping[str, torch.Tensor]
    """Tensors of the result that no graph uses."""
    buckets: Sequence[Sequence[Column]] = ()
    """Columns of the job's further buckets."""
    schedule: Schedule = ()
    recordings: Recordings = field(default_factory=Recordings)
    reference: ExpectedResults = field(default_factory=ExpectedResults)
    reordered: tuple[str, ...] = ()
    """Operators that do not give the same bits each time on the job's device."""
    files: Mapping[str, FileRange] = field(default_factory=dict)
    """Tensors of `tensors` that stay in the files that the job loaded them from, with their place there."""
    tapes: Mapping[tuple[int, int], Tape] = field(default_factory=dict)
    """Recordings of full batches, by their bucket and number of rows, that are still to be compared with others: with the first steps
    followed.
    """
    blocks: Mapping[str, WeightBlocks] = field(default_factory=dict)
    """Weights and their state that the graphs have in blocks, as in the manifest."""
    placed: tuple[str, ...] = ()
    """Kinds of devices that the graphs' operators are divided among; empty if all run on one, as recorded."""
    plain: PlainRun = field(default_factory=PlainRun)
    other_formulas: tuple[str, ...] = ()
    """Operators, with their lines, whose recorded gradient formula differs from plain PyTorch's."""
    known: KnownSteps | None = None
    """The steps of a program that counts or keeps tensors; None: every step is the same."""
    teams: tuple[CpuTeam, ...] = ()
    """Thread teams that the graphs' operators are divided among besides all threads of the bundle, as in the manifest."""

    @property
    def initial_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that training begins from, except constants."""
        return tuple(tensor for tensor in self.tensors.values() if isinstance(tensor, torch.Tensor))


# -- capture


def steps_and_updates(job: TrainingJob, epochs: int) -> tuple[int, int]:
    """Return the batches of one pass over a job's data, and the updates of `epochs` passes.

    Raises JobError for invalid data.
    """
    steps = sum(samples.size.batches(drop_last=False) for samples in checked_samples(job))
    return steps, epochs * steps // job.accumulate


def prepare(job: TrainingJob, *, updates: int = 0, followed: int = 0, ahead: Ahead | None = None) -> CapturedJob:
    """Capture every graph that the job's data will need: full batches, the last short one, evaluation.

    Each is recorded several times, on other rows. `updates`: for how many updates the scheduler's hyperparameters are
    tabulated at least. `followed`: that many of the job's first steps will be followed with plain PyTorch; where they show a full batch before and
    after an update, those are its further recordings. `ahead`: runs the job's program alone if its
    steps count, keep tensors or compute with other numbers each time; without, such steps are refused. Raises
    CaptureError for a step that cannot be recorded or is not the same each time, and GraphError for operators that a
    bundle may not call that way. Raises JobError for data or settings that cannot be trained on.
    """
    buckets, eval_data = checked_samples(job), checked_columns(job.eval_data, "eval_data")
    schedule = _schedule(job, updates)
    each_update: optimizer_scalars.Schedule = schedule or [[{}] * len(job.optimizer.param_groups)] * updates
    with unchanged_arithmetic():
        try:
            found = _record_cached(job, buckets, each_update, followed)
        except StatefulStepError as error:
            found = _RecordedSteps(known=_known_ahead(job, updates, schedule, ahead, error))
            _record_steps(job, buckets, each_update, followed, found)
        _check_same_updates(found.graphs)
        if eval_data:
            _record_evaluation(job, eval_data, found)
    captures = found.captures
    for graph in found.graphs.values():
        for op in graph.ops:
            check_operator(op.name)
        verify_operands(graph)
    graphs, tensors = _merge(captures, found.graphs)
    spec = captures[0].optimizer
    if spec is None:
        raise CaptureError("the step has no optimizer")
    layouts: dict[str, TensorLayout] = {}
    for capture in captures:
        layouts |= {k: v for k, v in capture.layouts.items() if k not in layouts}
    used = {s.key for g in graphs.values() for s in g.storages if s.persistent}
    constants = tuple(dict.fromkeys(c for capture in captures for c in capture.constants))
    result, unused = _result(job.model, used)
    return CapturedJob(
        job, graphs, {k: t for k, t in tensors.items() if k in used or k.startswith("constant/")},
        {k: v for k, v in layouts.items() if k in used}, spec, buckets[0].columns, eval_data, result, unused,
        [bucket.columns for bucket in buckets[1:]], schedule, Recordings(found.recorded, found.varied, constants), tapes=found.tapes, known=found.known,
        other_formulas=tuple(sorted(set[str]().union(*(capture.other_formulas for capture in captures)))),
    )  # fmt: skip


@dataclass(slots=True)
class _RecordedSteps:
    """The steps that were recorded: their graphs by name, how often the last one was recorded, and what else was recorded each time."""

    graphs: dict[str, StepGraph] = field(default_factory=dict)
    captures: list[Capture] = field(default_factory=list)
    tapes: dict[tuple[int, int], Tape] = field(default_factory=dict)
    results: StepResults = field(default_factory=StepResults)
    recorded: int = 1
    varied: tuple[str, ...] = _RANDOM
    known: KnownSteps | None = None


def _known_ahead(
    job: TrainingJob, updates: int, schedule: Schedule, ahead: Ahead | None, error: StatefulStepError
) -> KnownSteps:
    """Return the steps of the program run alone. Raises CaptureError, with the reason that `error` gives, if they are not known."""
    if ahead is None or not updates:
        raise error
    if job.eval_data or plateau_of(job) is not None:
        what = "An evaluation between such steps" if job.eval_data else "ReduceLROnPlateau with such steps"
        raise CaptureError(f"{error}. {what} is not supported") from error
    epoch = -(-steps_and_updates(job, 1)[0] // job.accumulate)  # in it batches of all shapes come
    try:
        return ahead(max(updates, epoch), spelled(job.optimizer, schedule))
    except CaptureError as unknown:
        raise CaptureError(f"{error}. All its steps, followed without contents: {unknown}") from unknown


def _record_cached(
    job: TrainingJob, buckets: Sequence[JobSamples], each_update: optimizer_scalars.Schedule, followed: int
) -> _RecordedSteps:
    """Record the steps of a program that may keep constants, such as a mask for each length; its first step on a shape creates them.

    What it does with them shows once they exist, so its steps are recorded again then.
    """
    shapes = sum(len(_batch_sizes(samples.size, job.drop_last)) for samples in buckets)
    while True:
        found = _RecordedSteps()
        try:
            _record_steps(job, buckets, each_update, followed, found)
            return found
        except CaptureError as error:
            if isinstance(error, StatefulStepError) or not shapes or not found.results.kept_constants():
                raise
            shapes -= 1


def _record_steps(
    job: TrainingJob,
    buckets: Sequence[JobSamples],
    each_update: optimizer_scalars.Schedule,
    followed: int,
    found: _RecordedSteps,
) -> None:
    """Record a step for each shape of the job's batches, each of them several times, in `found`."""
    kind, known = kind_of_job(job), found.known
    for number, samples in enumerate(buckets):
        data, size, loss_fn = samples.columns, samples.size, _watched_loss(job.loss_of(number))
        for rows in _batch_sizes(size, job.drop_last):
            full = rows == size.batch_size
            others = _other_batches(data, rows, job.seed)
            found.recorded = 1 + len(others)
            found.varied = _ROWS_AND_RANDOM if full and not number and _differ(data, rows, others) else found.varied
            later = full and _is_shown(job, number, size, followed)
            shape = None if known is None else known.of(number, rows)
            if known is not None and shape is None:
                raise CaptureError(
                    f"a batch of {rows} rows comes after the updates that are planned for; give more --epochs"
                )
            with own_code(f"a step on a batch of {rows} rows"):  # hooks run in the backward pass
                capture = capture_step(
                    job.model,
                    loss_fn,
                    job.optimizer,
                    on_device((c[:rows] for c in data), kind),
                    clip_grad_norm=job.clip_grad_norm,
                    accumulate=job.accumulate,
                    repetition=Repetition([on_device(o, kind) for o in others], later, found.results, shape),
                    schedule=each_update[:1] if found.captures else each_update,
                )
            found.graphs |= {graph_name(k, rows, size, number): g for k, g in capture.graphs.items()}
            found.captures.append(capture)
            if capture.tape is not None:
                found.tapes[number, rows] = capture.tape
            if not job.allow_nonfinite and not math.isfinite(capture.loss):
                raise JobError(
                    f"the loss on the first {rows} rows of the data is {capture.loss}; look for values in the data, the "
                    "model or its start that are not finite, or set allow_nonfinite=True in the job"
                )


def _record_evaluation(job: TrainingJob, data: Sequence[Column], found: _RecordedSteps) -> None:
    """Record also the evaluation of each shape of batches of `data`."""
    kind, size = kind_of_job(job), BucketSize(data[0].shape[0], job.batch_size)
    for rows in _batch_sizes(size, drop_last=False):
        others = [on_device(o, kind) for o in _other_batches(data, rows, job.seed)]
        batch = on_device((c[:rows] for c in data), kind)
        capture = capture_evaluation(
            job.model, _watched_loss(job.loss_fn), batch, Repetition(others, results=found.results)
        )
        found.graphs[graph_name("eval", rows, size)] = capture.graphs["eval"]
        found.captures.append(capture)


def _is_shown(job: TrainingJob, bucket: int, size: BucketSize, followed: int) -> bool:
    """Return whether the first `followed` steps show a full batch of a bucket without gradients before it, and after an update.

    Of several buckets, the first steps are one of each, in their order.
    """
    if job.buckets:
        return bucket < followed and bucket >= job.accumulate and bucket % job.accumulate == 0
    return job.accumulate < min(followed, size.samples // size.batch_size)


def _result(model: torch.nn.Module, used: Set[str]) -> tuple[tuple[str, ...], dict[str, torch.Tensor]]:
    """Return the names of the model's state, and its tensors that are not `used`.

    Tied tensors are named once, as safetensors' `save_model` does. Raises JobError for one that its format cannot hold.
    """
    state = {k: t for k, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    distinct = {id(t): name for name, t in reversed(state.items())}
    distinct |= {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers()) if n in state}
    names = tuple(sorted(distinct.values()))
    for name in names:
        kind = str(state[name].dtype).removeprefix("torch.")
        if kind not in STORED_DTYPES:
            raise JobError(
                f"{name} of the model is {kind}, which no file of weights holds; give one of {', '.join(STORED_DTYPES)}"
            )
    keys = {n: {storage_key(Role.PARAMETER, n), storage_key(Role.BUFFER, n)} for n in names}
    return names, {n: state[n].detach() for n in names if not keys[n] & used}


def _watched_loss(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function whose errors name the batch and the user's own lines."""

    def watched(model: torch.nn.Module, *batch: torch.Tensor) -> Any:
        columns = ", ".join(f"{str(c.dtype).removeprefix('torch.')} {list(c.shape)}" for c in batch)
        with own_code(f"loss_fn(model, *batch) on a batch of {columns}"):
            return loss_fn(model, *batch)

    return watched


def _batch_sizes(size: BucketSize, drop_last: bool) -> list[int]:
    rest = size.samples % size.batch_size
    sizes = [size.batch_size] if size.samples >= size.batch_size else []
    return sizes + ([rest] if rest and not drop_last else [])


def _check_same_updates(graphs: Mapping[str, StepGraph]) -> None:
    """Raise CaptureError unless the batches of every shape update the same tensors: the optimizer has one count of updates for all."""
    names = list(graphs)
    for name, graph in graphs.items():
        first = next(n for n in names if kind_of_graph(n) == kind_of_graph(name))
        differing = sorted(_updated(graphs[first]) ^ _updated(graph))
        if differing:
            raise CaptureError(
                f"batches of {_batch_shapes(graph)} do not update the same tensors as those of {_batch_shapes(graphs[first])}: "
                f"{', '.join(differing[:_MAX_NAMED])}; train with `port-agent exec`, which supports this"
            )


def _updated(graph: StepGraph) -> set[str]:
    storages = graph.storages
    return {
        storages[s].key for op in graph.ops if op.phase is Phase.UPDATE for s in op.writes if storages[s].persistent
    }


def _batch_shapes(graph: StepGraph) -> str:
    return ", ".join(f"{graph.values[v].dtype} {[*graph.values[v].shape]}" for v in graph.batch)


def _other_batches(data: Sequence[Column], rows: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Return batches of rows from all over the data."""
    order = epoch_order(seed, 0, data[0].shape[0])
    return [tuple(c[chosen] for c in data) for chosen in (order[:rows], order[-rows:])]


def _differ(data: Sequence[Column], rows: int, others: Sequence[tuple[torch.Tensor, ...]]) -> bool:
    """Return whether in every column some batch has other contents than the first rows."""
    return all(any(not torch.equal(c[:rows], other[i]) for other in others) for i, c in enumerate(data))


def _merge(
    captures: Sequence[Capture], graphs: dict[str, StepGraph]
) -> tuple[dict[str, StepGraph], dict[str, torch.Tensor | Fill]]:
    """Give the constants of each capture distinct names, so that all graphs can share one table of tensors."""
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


def _schedule(job: TrainingJob, updates: int) -> Schedule:
    """Tabulate the job's schedule for `updates`, and for some further epochs if that takes no time."""
    further = 0
    if optimizer_scalars.is_supported(job.optimizer):  # other updates run one by one
        further = min(steps_and_updates(job, _TABULATED_EPOCHS)[1], _MAX_TABULATED)
    return tabulated(job, updates, further)


def with_blocks(captured: CapturedJob, graphs: Mapping[str, StepGraph], blocks: Mapping[str, Blocks]) -> CapturedJob:
    """Return a job whose `graphs` have state tensors, by key, in these blocks: along dimension 0, and 1 if there are
    some.
    """
    tensors, layouts = dict(captured.tensors), dict(captured.layouts)
    made = dict(captured.blocks)
    for key, ways in blocks.items():
        whole, layout = tensors.pop(key), layouts[key]
        stored = [block for block in itertools.chain.from_iterable(ways.values()) if block.stored]
        for block in stored:
            tensors[key + block.suffix], shape = _block(whole, layout, block)
            layouts[key + block.suffix] = TensorLayout(layout.dtype, shape, (shape[1], 1))
        rows, columns = (
            tuple(key + block.suffix for block in stored if block.dimension == way) for way in (ROWS, COLUMNS)
        )
        made[key] = WeightBlocks(rows, columns)
    return replace(captured, graphs=graphs, tensors=tensors, layouts=layouts, blocks=made)


def _block(
    whole: torch.Tensor | Fill | TensorSlice, layout: TensorLayout, block: Block
) -> tuple[Fill | TensorSlice, tuple[int, ...]]:
    """Return a block's initial contents and its shape."""
    shape = [*layout.shape]
    shape[block.dimension] = block.end - block.begin
    if isinstance(whole, Fill):
        return replace(whole, shape=tuple(shape)), tuple(shape)
    source = whole if isinstance(whole, torch.Tensor) else whole.tensor
    matrix = source.detach().as_strided(layout.shape, layout.stride, layout.offset)
    return TensorSlice(matrix.narrow(block.dimension, block.begin, block.end - block.begin)), tuple(shape)


# -- plan


PlanFunction = Callable[[StepGraph, CostTable, int], PlanResult]


def plan_all(
    captured: CapturedJob,
    measured: MeasuredCosts,
    device: DeviceCosts,
    ram_bytes: int,
    planner: PlanFunction,
    limits: PlannedLimits = NO_LIMITS,
) -> tuple[dict[str, Plan], dict[str, CostTable]]:
    """Return a plan and a cost table for every graph: by `planner` for the first of each kind.

    Graphs of further shapes, such as short batches, get the necessary part of the plan of the next larger graph of the same
    program. If that is not nearly free (`port_planner.search.transferred`), a quick search within `limits` finds a plan.
    Raises InfeasibleError for the first graph that does not fit.
    """
    plans, costs = dict[str, Plan](), dict[str, CostTable]()
    for (name, graph), table in zip(captured.graphs.items(), measured.tables(device), strict=True):
        costs[name] = table
        known = [n for n in plans if kind_of_graph(n) == kind_of_graph(name)]
        plan, like = None, neighbour(graph, {n: captured.graphs[n] for n in known})
        quick = plan_problem(graph, table, ram_bytes, "greedy", _NEIGHBOUR_S, limits)
        if like is not None:
            plan = transferred(graph, table, quick.limits, plans[like])
        if plan is None:
            rivals = () if like is None else (plans[like],)
            result = quick.solved(rivals=rivals) if known else planner(graph, table, ram_bytes)
            if result.plan is None:
                raise InfeasibleError(
                    f"graph {name!r}: {result.message}", result.needed_bytes, result.fastest_seconds,
                    option=device.budget_option, remedy=result.remedy,
                )  # fmt: skip
            plan = result.plan
        plans[name] = plan
    return plans, costs


def neighbour(graph: StepGraph, others: Mapping[str, StepGraph]) -> str | None:
    """Return the name of the same program's step with the next larger size; the largest if none is larger; else None."""
    alike = {n: computed_bytes(g) for n, g in others.items() if g.once(structure) == graph.once(structure)}
    larger = {n: nbytes for n, nbytes in alike.items() if nbytes >= computed_bytes(graph)}
    if larger:
        return min(larger, key=larger.__getitem__)
    return max(alike, key=alike.__getitem__, default=None)


def default_planner(
    *,
    strategy: str,
    time_limit_s: float,
    progress: Any = None,
    limits: PlannedLimits = NO_LIMITS,
    iterations: int | None = None,
) -> PlanFunction:
    """Return the planner that the command line uses, for plans within `limits`; evaluation has no deadline.

    `iterations`: attempts of a search in place of `time_limit_s`; the plan is then the same in each run.
    """

    def plan(graph: StepGraph, costs: CostTable, ram_bytes: int) -> PlanResult:
        limit = time_limit_s if iterations is None else iterations
        with contextlib.nullcontext() if iterations is None else clock.counted():
            return plan_problem(graph, costs, ram_bytes, strategy, limit, limits).solved(progress)

    return plan


# -- write


def write(
    path: Path,
    captured: CapturedJob,
    plans: Sequence[Mapping[str, Plan]],
    costs: Mapping[str, CostTable],
    budgets: Sequence[int],
    *,
    threads: int,
    estimated: bool = False,
    limits: PlannedLimits = NO_LIMITS,
) -> Manifest:
    """Write the bundle and return its manifest. Raises BundleError if it cannot be written."""
    manifest = describe(captured, plans, costs, budgets, threads=threads, estimated=estimated, limits=limits)
    kept = {k: t for k, t in captured.tensors.items() if not isinstance(t, Fill) and k not in captured.files}
    tensors = {k: _storage_chunks(t) for k, t in kept.items()}
    tensors |= {f"unused/{k}": tensor_chunks(t.contiguous()) for k, t in captured.unused.items()}
    parts = {train_part(bucket): columns for bucket, columns in enumerate((captured.data, *captured.buckets))}
    data = {f"{part}/{i}": tensor_chunks(c) for part, columns in parts.items() for i, c in enumerate(columns)}
    data |= {f"eval/{i}": tensor_chunks(c) for i, c in enumerate(captured.eval_data)}
    write_bundle(path, Contents(manifest, captured.graphs, costs, plans, tensors, data))
    return manifest


def describe(
    captured: CapturedJob,
    plans: Sequence[Mapping[str, Plan]],
    costs: Mapping[str, CostTable],
    budgets: Sequence[int],
    *,
    threads: int,
    estimated: bool = False,
    limits: PlannedLimits = NO_LIMITS,
) -> Manifest:
    """Return the manifest of a bundle with these plans, made to respect `limits`.

    `estimated`: the costs are another board's.
    """
    job = captured.job
    first = captured.graphs[next(iter(captured.graphs))]
    batch = tuple(TensorLayout(v.dtype, v.shape, v.stride, v.offset) for v in (first.values[b] for b in first.batch))
    device = next(iter(costs.values())).device
    return Manifest(
        name=job.name, torch=torch.__version__, threads=threads, seed=job.seed, batch_size=job.batch_size,
        accumulate=job.accumulate, samples=captured.data[0].shape[0], drop_last=job.drop_last,
        graphs=tuple(captured.graphs), batch=batch,
        plans=tuple(choice_of(b, p, captured.graphs, costs, job.accumulate) for b, p in zip(budgets, plans, strict=True)),
        optimizer=captured.optimizer.as_data(),
        layouts=captured.layouts,
        fills={k: t.value for k, t in captured.tensors.items() if isinstance(t, Fill)},
        result=captured.result,
        device=device.name, estimated=estimated,
        eval_samples=captured.eval_data[0].shape[0] if captured.eval_data else 0,
        schedule=captured.schedule, allow_nonfinite=job.allow_nonfinite, reference=captured.reference,
        recordings=captured.recordings, limits=limits, device_kind=first.device, reordered=captured.reordered, placed=captured.placed,
        teams=captured.teams,
        pruning=job.pruning, files=captured.files,
        in_pieces=any(graph.tiles for graph in captured.graphs.values()),
        summed_in_pieces=any(tile.reordered for graph in captured.graphs.values() for tile in graph.tiles),
        buckets=tuple(
            BucketSize(columns[0].shape[0], bucket.batch_size)
            for columns, bucket in zip(captured.buckets, job.buckets, strict=True)
        ),
        blocks=captured.blocks, plain=captured.plain, known=captured.known, proximal=_proximal_term(captured), plateau=plateau_of(job),
    )  # fmt: skip


def _proximal_term(captured: CapturedJob) -> ProximalTerm | None:
    job = captured.job
    if job.proximal_mu is None:
        return None
    kept = {key: name for key, name in kept_starts(job.model).items() if key in captured.layouts}
    return ProximalTerm(float(job.proximal_mu), kept)


def _storage_chunks(tensor: torch.Tensor | TensorSlice) -> Chunks:
    """A storage's raw bytes."""
    if isinstance(tensor, TensorSlice):
        part = tensor.tensor
        return Chunks("uint8", (part.numel() * part.itemsize,), lambda: chunks_of_tensor(part))
    return Chunks("uint8", (tensor.untyped_storage().nbytes(),), lambda: storage_chunks(tensor))


def tensor_chunks(tensor: Column) -> Chunks:
    """Return a contiguous tensor, or a column in a file, for writing."""
    chunks = tensor.chunks if isinstance(tensor, ColumnFile) else partial(chunks_of_tensor, tensor)
    return Chunks(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), chunks)
