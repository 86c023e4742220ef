"""Run a bundle: batches, steps, commits, evaluation and resuming; the worker's core, single-threaded except for the
page thread.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from port_agent.backend.choose import backend_of
from port_agent.backend.cuda import pin_as_asked
from port_agent.backend.staging import Staging
from port_agent.packing.pages import ITEM_BYTES
from port_agent.paging.pager import BURST, CHUNK, CorruptPageError, Pager, PagerStats, make_directory
from port_agent.training.batching import Batching, BatchRows
from port_agent.training.comparison import compare_generators, compare_step
from port_agent.training.executor import Executor, StepReport
from port_agent.training.executors import Executors
from port_agent.training.programs import Programs
from port_agent.training.pruning import WeightPruning
from port_agent.training.result import save_result
from port_agent.training.samples.bundled import Samples
from port_agent.training.samples.columns import DataError
from port_agent.training.samples.incoming import Arrivals
from port_agent.training.state.checkpoint import SLOTS, Commit, StateStore
from port_agent.training.state.finite import check_loss
from port_agent.training.state.given_weights import GivenWeights
from port_agent.training.state.resident_state import Persistents, initial_contents
from port_agent.worker.protocol import StateRecovered, StepDone
from port_agent.worker.thread_limit import check_thread_limit
from port_agent.worker.worker_options import TorchOptions
from port_planner.base.errors import ExitCode, PortError
from port_planner.base.process_memory import peak_resident_bytes, resident_bytes
from port_planner.exactness.applied_arithmetic import UnavailableArithmeticError, set_arithmetic
from port_planner.exactness.half_products import report_once
from port_planner.ir.arithmetic import Arithmetic
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import (
    UPDATING,
    WHOLE_UPDATE,
    BucketSize,
    BundleError,
    ExpectedResults,
    FileRange,
    Manifest,
    batch_kind,
    graph_name,
    train_part,
)
from port_planner.ir.costs import Flash
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import Phase, Role, storage_key
from port_planner.ir.lowering.optimizer_scalars import OptimizerSpec, StepScalars
from port_planner.ir.program import Program
from port_planner.ir.torch_arithmetic import arithmetic
from port_planner.ir.torch_device import generator_states, repeat_kernels, restore_generators
from port_planner.ir.torch_operators import dtype

_PARAMETER = storage_key(Role.PARAMETER, "")
_PRUNED_DIMENSIONS = 2
"""Least number of dimensions of pruned weights: biases and norms are few, and each of them matters."""

_KNOWN_SPEED_BYTES = 16 << 20
"""Bytes after which the page thread's writes show the speed of the medium."""


@dataclass(slots=True)
class StepEvent:
    """The results of one step, for reports and for the supervisor."""

    step: int
    epoch: int
    loss: float
    wall_s: float
    cpu_s: float
    report: StepReport = field(repr=False)
    planned_s: float = 0.0
    planned_compute_s: float = 0.0
    """Part of it that the operators are planned to take, including recomputation."""
    planned_joules: float | None = None
    paging: PagerStats = field(default_factory=PagerStats)
    """Work of the page thread during the step, including errors in the pages that were read."""


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """A batch's share of a run: seconds, and what was moved meanwhile."""

    wall_s: float
    cpu_s: float
    report: StepReport
    paging: PagerStats


@dataclass(frozen=True, slots=True)
class _OpenStep:
    """The step in progress: what a commit of the previous steps would record, and when it began (perf_counter)."""

    progress: dict[str, Any]
    executor: Executor
    began_s: float


class PastEndError(PortError):
    """The state directory is further advanced than the requested training."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(slots=True)
class Evaluation:
    """Loss and metric over the evaluation data; `best`: the lowest loss so far."""

    step: int
    loss: float
    metric: float | None
    best: bool
    paging: PagerStats = field(default_factory=PagerStats)


def _require_epochs(manifest: Manifest, options: TorchOptions) -> None:
    """Raise BundleError if learning rates follow the losses of epochs but the run has no epochs."""
    if manifest.plateau is not None and (options.data is not None or options.weights is not None):
        raise BundleError(
            f"the learning rates of {manifest.name} follow the losses of its own epochs (ReduceLROnPlateau), which "
            "data that arrives and rounds of a federation do not have; plan the job with another scheduler"
        )


class Trainer:
    """One job in progress."""

    def __init__(self, bundle: Bundle, options: TorchOptions) -> None:
        self.bundle, self.options, self.manifest = bundle, options, bundle.manifest
        check_thread_limit(max(self.manifest.threads, *(team.threads for team in self.manifest.teams), 1))
        torch.set_num_threads(self.manifest.threads)
        page_dirs = (options.page_dir or options.state_dir, *options.scratch_dirs)
        for folder in (options.state_dir, *page_dirs):
            make_directory(folder)
        self.backend = backend_of(bundle.manifest.device_kind)
        pin_as_asked(self.backend.kind)
        shares = next(iter(bundle.costs.values())).device.shares_pages
        staging = None if self.backend.addressable else Staging(self.backend, BURST, shares=shares)
        repeat_kernels(self.backend.kind)
        self.pager = Pager(read_bytes_per_s=options.read_limit, write_bytes_per_s=options.write_limit, staging=staging)
        sizes = {s.key: s.nbytes for g in bundle.graphs.values() for s in g.storages if s.persistent}
        layouts = {} if self.manifest.allow_nonfinite else self.manifest.layouts
        finite = {key: dtype(layout.dtype) for key, layout in layouts.items()}
        self.store = StateStore(
            options.state_dir,
            sizes,
            self.pager,
            job=bundle.id,
            finite=finite,
            item_bytes=self._packed_items(),
            in_files=self._in_files(sizes),
        )
        self.persistents = Persistents(self.store, self.manifest.layouts, self.manifest.blocks)
        parts = [train_part(bucket) for bucket in range(len(self.manifest.sizes))]
        self.samples: Samples | Arrivals = Samples(bundle, parts)
        if options.data is not None:
            columns = [[bundle.data[f"{part}/{i}"] for i in range(len(self.manifest.batch))] for part in parts]
            self.samples = Arrivals(options.data, columns, options.state_dir)
        self.eval_samples = Samples(bundle, ["eval"])
        self.programs = Programs(bundle, options.plan or 0)
        self.executors = Executors(
            bundle,
            self.programs,
            self.persistents,
            self.store,
            self.pager,
            self.backend,
            page_dirs,
            probe_packing=options.probe_packing,
        )
        self._outside_bytes = self.backend.outside_bytes()
        compared = min(options.verify, len(self._reference.losses))
        self.batching = Batching(bundle, self._counts, compared)
        pruning, updates = self.manifest.pruning, -(-compared // self.manifest.accumulate)
        self._pruning = None if pruning is None else WeightPruning(pruning, updates)
        self._have_run: set[str] = set()
        self._device_limit_bytes = 0
        self.scalars = self._first_scalars()
        self.step = self.uncommitted = 0
        self.best_loss = math.inf
        self._open: _OpenStep | None = None
        self._last_step_s = math.inf
        self._recoveries = 0
        """Number of recoveries since a step last ended for the first time."""
        self._furthest = 0
        self.commit_bytes = 0
        """Bytes that the last commit wrote besides the step's own paging."""

    @property
    def _counts(self) -> Sequence[int]:
        """The number of samples in each bucket."""
        return self.manifest.plain.rows if self.options.referee else self.samples.counts

    @property
    def _reference(self) -> ExpectedResults:
        return self.manifest.plain.results if self.options.referee else self.manifest.reference

    @property
    def _targets(self) -> tuple[Flash, ...]:
        return next(iter(self.bundle.costs.values())).device.targets

    def _packed_items(self) -> dict[str, int]:
        """Return the storages that are packed on flash, with the size of their numbers."""
        if not self._targets[0].packs_pages:
            return {}
        sizes = {key: dtype(layout.dtype).itemsize for key, layout in self.manifest.layouts.items()}
        numbers = (key for key, layout in self.manifest.layouts.items() if dtype(layout.dtype).is_floating_point)
        return {key: sizes[key] for key in numbers if sizes[key] in ITEM_BYTES}

    def _in_files(self, sizes: Mapping[str, int]) -> dict[str, FileRange]:
        """Return the frozen weights that may be read from the user's files: all except those that others may replace,
        and those in packed pages.
        """
        files, packed = self.manifest.files.items(), self._packed_items()
        if self.options.weights is not None:
            return {}
        return {key: part for key, part in files if key not in packed and part.nbytes == sizes.get(key)}

    # -- beginning and end

    def start(self) -> Commit:
        """Load the last commit, or start from the beginning; raise BundleError if a tensor of the bundle is damaged."""
        _require_epochs(self.manifest, self.options)
        for key in self.bundle.tensors.keys() - self.store.sizes.keys() - self.executors.constants.keys():
            for _ in self.bundle.contents(key, CHUNK):
                pass  # only the result needs these: better rejected now than after training
        for name in sorted({layout.dtype for layout in self.manifest.layouts.values()}):
            report_once(dtype(name))
        self._limit_device()
        commit = self.store.open() or self._create()
        self._restore(commit)
        return commit

    def _compute_as(self, then: Arithmetic | None) -> None:
        """Set torch to the arithmetic settings of a bundle or a commit; None: no settings.

        Raises UnavailableArithmeticError if bits matter.
        """
        if then is not None:
            with contextlib.nullcontext() if self.options.verify else contextlib.suppress(UnavailableArithmeticError):
                set_arithmetic(then._replace(threads=self.manifest.threads))

    def _first_scalars(self) -> StepScalars:
        m = self.manifest
        return StepScalars(OptimizerSpec.of(m.optimizer), m.schedule, m.known, m.plateau)

    def _create(self) -> Commit:
        self._compute_as(self.manifest.reference.arithmetic)
        self.scalars = self._first_scalars()
        self.best_loss = math.inf
        torch.manual_seed(self.manifest.seed + self._rounds_before)
        sizes, given = self.store.sizes, GivenWeights(self.bundle, self.options.weights)

        def contents(key: str) -> Iterator[torch.Tensor]:
            return given.contents(key, initial_contents(self.bundle, key, sizes[key]))

        return self.store.create(contents, self._progress())

    def _restore(self, commit: Commit) -> None:
        self.step = commit.step if commit.progress.get("round", 0) == (self.options.round or 0) else 0
        self.scalars.steps_done = commit.progress["updates"]
        self.best_loss = commit.progress["best_loss"]
        if self.scalars.plateau is not None:
            self.scalars.plateau.restore(commit.progress["plateau"])
        if self._pruning is not None:
            self._pruning.thresholds = dict(commit.progress.get("pruned_below", {}))
        self.programs.restore(commit.progress)
        self._compute_as(msgspec.convert(commit.progress.get("arithmetic"), Arithmetic | None))
        restore_generators(
            {
                kind: torch.frombuffer(bytearray(state), dtype=torch.uint8)
                for kind, state in ((CPU, commit.progress["rng"]), *commit.progress.get("device_rng", {}).items())
            }
        )
        self.persistents.forget()
        self.uncommitted = 0
        self._open = None

    def _progress(self) -> dict[str, Any]:
        return {
            "updates": self.scalars.steps_done,
            "best_loss": self.best_loss,
            "round": self.options.round or 0,
            "rng": torch.get_rng_state().numpy().tobytes(),
            "arithmetic": arithmetic(),
            **self.programs.progress(),
            **({} if self.scalars.plateau is None else {"plateau": self.scalars.plateau.values()}),
            **({} if self._pruning is None else {"pruned_below": dict(self._pruning.thresholds)}),
            **self._device_generator(),
        }

    def _device_generator(self) -> dict[str, Any]:
        if self.backend.kind == CPU:
            return {}
        return {"device_rng": {self.backend.kind: self.backend.generator_state().numpy().tobytes()}}

    def close(self) -> None:
        """Stop the page thread and delete scratch files; uncommitted steps are lost."""
        self.pager.close()
        self.executors.close()
        self.store.close()
        self.samples.close()
        self.eval_samples.close()

    # -- what runs a step

    def interrupt(self) -> None:
        """Make the executors call `gate` before the next instruction; any thread may do so."""
        self.executors.interrupt()

    def use_plan(self, index: int) -> None:
        """Switch to another plan of the frontier, from the next step on.

        Raises PortError if the bundle has no such plan.
        """
        self.programs.use_plan(index)
        self._limit_device()

    def _limit_device(self) -> None:
        """Limit tensors to the device memory that the plan's budget leaves for them, because no kernel limits it."""
        choice = self.manifest.plans[self.programs.plan_index]
        held = self._outside_bytes + (resident_bytes() if self.backend.unified else 0)
        self._device_limit_bytes = max(0, (choice.device_ram_bytes or choice.ram_bytes) - held)
        self.backend.limit(self._device_limit_bytes)

    @property
    def device_peak_bytes(self) -> int | None:
        """Peak of the device's memory, for tensors, context and libraries, in bytes; None on the CPU."""
        return None if self.backend.kind == CPU else self._outside_bytes + self.backend.peak_bytes()

    @property
    def device_excess_bytes(self) -> int:
        """Bytes by which tensors exceeded their planned share of the device's memory; 0 on the CPU."""
        return max(0, self.backend.peak_bytes() - self._device_limit_bytes)

    # -- training

    def train(
        self,
        on_step: Callable[[StepEvent], None],
        on_commit: Callable[[Commit, float], None],
        finish: Callable[[], None] = lambda: None,
        on_recovery: Callable[[StateRecovered], None] = lambda event: None,
    ) -> None:
        """Run until `options.steps` batches are done in total, then `finish`.

        After a damaged block, training resumes from an intact commit. Raises CorruptPageError if the medium damages
        every commit again. Raises BundleError if the bundle lacks the optimizer's numbers for that many updates, and
        PastEndError if more steps are already done than requested.
        """
        if self.step > self.total_steps and self.options.data is None:
            raise PastEndError(
                f"{self.options.state_dir} is already at step {self.step:,}, but this training ends at step "
                f"{self.total_steps:,}; give more --epochs or --steps, or another --state-dir to start again"
            )
        accumulate = self.manifest.accumulate
        self.manifest.require_known(self.scalars.steps_done + self.total_steps // accumulate - self.step // accumulate)
        while True:
            try:
                self._train_until(self.total_steps, on_step, on_commit)
                finish()
                return
            except CorruptPageError as error:
                self._recoveries += 1
                if self._recoveries > SLOTS + 1:  # every commit that can exist, and a new start
                    raise
                on_recovery(self._recover(error))

    def _recover(self, error: CorruptPageError) -> StateRecovered:
        """Go back to the latest commit that does not use the damaged block.

        Raises BundleError if that block is in a file of the user.
        """
        if self.store.lies_in_file(error.path):
            raise BundleError(
                f"{error.path} was changed since the bundle was made; restore the file that the bundle was made "
                "from, or plan the job again"
            ) from error
        reached, self._furthest = self.step, max(self.step, self._furthest)
        if error.path == self.store.file.path and self.store.avoid(error.offset):
            self.store.discard_latest()
        self._restore(self.store.open() or self._create())
        return StateRecovered(step=self.step, lost_steps=reached - self.step, reason=str(error))

    @property
    def total_steps(self) -> int:
        steps = self.options.steps
        return (self.options.epochs or 1) * self.batching.per_epoch if steps is None else steps

    @property
    def _rounds_before(self) -> int:
        """Rounds of a federation before this one: each draws new masks, and continues in the data
        where the previous one ended.
        """
        return 0 if self.options.weights is None else self.options.round or 0

    def _train_until(
        self, total: int, on_step: Callable[[StepEvent], None], on_commit: Callable[[Commit, float], None]
    ) -> None:
        before = self._rounds_before * total
        for together in self.batching.runs(self.step, total, before=before):
            if self.executors.interrupted:
                self.executors.pass_gate()
            for event in self._one_run(together):
                on_step(event)
            due = self.uncommitted >= (self.options.checkpoint_every or 1) or self.step == total
            if due and not self.options.discard:
                self.commit(on_commit)

    def commit(self, on_commit: Callable[[Commit, float], None]) -> None:
        """Make the finished steps durable, if any are not."""
        self._commit(self.persistents.commit, on_commit)

    def _commit(
        self, write: Callable[[int, dict[str, Any]], Commit], on_commit: Callable[[Commit, float], None]
    ) -> None:
        if not self.uncommitted:
            return
        begin, written = time.perf_counter(), self.pager.stats.written_bytes
        progress = self._progress() if self._open is None else self._open.progress
        commit = write(self.step, progress)
        self.uncommitted = 0
        self.commit_bytes = self.pager.stats.written_bytes - written
        on_commit(commit, time.perf_counter() - begin)

    def commit_finished_steps(self, within_s: float, on_commit: Callable[[Commit, float], None]) -> None:
        """Make the finished steps durable during a step that never ends, if that takes less than `within_s`.

        Memory is freed as it is written, so nothing can run afterwards. Does nothing if the open step has already begun
        its update; everything after the last checkpoint is then lost.
        """
        if self._commit_s() < within_s and not (self._open and self._open.executor.changed):
            if self._open is not None:
                self._open.executor.undo()
            self._commit(self.persistents.commit_and_free, on_commit)

    def finishes_first(self, within_s: float) -> bool:
        """Return whether the open step has begun its update, and can be finished and committed within `within_s`.

        Half an update is useless, because neither the state before nor the one after exists. If no finished steps wait
        for a commit, only the open step would be lost.
        """
        if self._open is None or not self._open.executor.changed or not self.uncommitted:
            return False
        left_s = max(0.0, self._last_step_s - (time.perf_counter() - self._open.began_s))
        return left_s + self._commit_s() < within_s

    def _commit_s(self) -> float:
        """Return the expected seconds of a commit, at the speed of the writes so far or of the plan."""
        stats = self.pager.stats
        flash = next(iter(self.bundle.costs.values())).device.flash
        known = stats.written_bytes >= _KNOWN_SPEED_BYTES and stats.write_seconds > 0
        speed = stats.written_bytes / stats.write_seconds if known else flash.write_bytes_per_s
        return self.persistents.unwritten_bytes / speed

    def _one_run(self, together: Sequence[BatchRows]) -> list[StepEvent]:
        """Run one batch, or all batches of an update at once, and return the results of each, which are
        equal shares of the whole.
        """
        m, count = self.manifest, len(together)
        kind = WHOLE_UPDATE if count > 1 else batch_kind(self.step, m.accumulate)
        _, bucket, rows = together[0]
        name = graph_name(kind, rows.numel(), m.sizes[bucket], bucket)
        self._open = _OpenStep(self._progress(), self.executors.of(name), time.perf_counter())
        place = m.accumulate - 1 if kind in UPDATING else self.step % m.accumulate
        scalars = self.scalars.of_batch(place, m.accumulate)
        batch = [column for _, part, taken in together for column in self.samples.batch(taken.tolist(), part)]
        wall, cpu = time.perf_counter(), time.process_time()
        before = replace(self.pager.stats)
        try:
            report = self._run(name, batch, scalars)
        except IndexError as error:
            raise DataError(
                f"step {self.step + 1} takes a label or index that does not exist ({error}); look for it in the data"
            ) from error
        if self._pruning is not None and kind in UPDATING:
            self._pruning.updated(self.scalars.steps_done, self._weights(self.programs.of(name)), self.persistents)
        self._open = None
        self._last_step_s = time.perf_counter() - wall
        shares = self.pager.stats.since(before).shares(count)
        wall_s, cpu_s = (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count
        shared = replace(report, phases_s={phase: spent / count for phase, spent in report.phases_s.items()})
        losses = [loss.item() for loss in (*(report.aux if count > 1 else ()), report.loss)]
        return [
            self._done(epoch, loss, name, _StepTimes(wall_s, cpu_s, shared, share))
            for (epoch, _, _), loss, share in zip(together, losses, shares, strict=True)
        ]

    def _done(self, epoch: int, loss: float, name: str, times: _StepTimes) -> StepEvent:
        """Count a batch as done, check its loss, and return its results."""
        m = self.manifest
        self.step += 1
        self.uncommitted += 1
        if self.step > self._furthest:
            self._furthest, self._recoveries = self.step, 0
        if not m.allow_nonfinite:
            check_loss(loss, self.step)
        if self.scalars.plateau is not None:
            self.scalars.plateau.batch_done(loss)
            if self.step % self.batching.per_epoch == 0:
                self.scalars.plateau.epoch_done()
        program, batches = self.programs.of(name), m.batches_of(name)
        event = StepEvent(
            self.step,
            epoch,
            loss,
            times.wall_s,
            times.cpu_s,
            times.report,
            program.seconds / batches,
            program.compute_seconds / batches,
            program.joules / batches,
            times.paging,
        )
        if self.step <= self.options.verify:
            compare_step(self._reference, self.step, loss, self.persistents.chunks_of, self.backend.kind)
            if self.options.referee and self.step == len(self._reference.losses):
                compare_generators(m.plain.generators, self.backend.kind)
        return event

    def _run(self, name: str, batch: list[torch.Tensor], scalars: list[float | int]) -> StepReport:
        program = self.programs.of(name)
        self.persistents.prepare(program)
        report = self.executors.of(name).run(batch, scalars)
        self.persistents.stepped(program)
        self.programs.note(name, report.packing)
        if name not in self._have_run:  # an operator's library is loaded when it first runs
            self._have_run.add(name)
            self._outside_bytes = max(self._outside_bytes, self.backend.outside_bytes())
        return report

    def _weights(self, program: Program) -> list[str]:
        """Return those weights that a program has just updated and that are pruned."""
        keys = {
            program.graph.storages[s].key for op in program.graph.ops if op.phase is Phase.UPDATE for s in op.writes
        }
        weights = sorted(key for key in keys & self.manifest.layouts.keys() if key.startswith(_PARAMETER))
        return [key for key in weights if len(self.manifest.layouts[key].shape) >= _PRUNED_DIMENSIONS]

    # -- evaluation and results

    def evaluate(self) -> Evaluation | None:
        """Return loss and metric over the evaluation data, or over one batch of each size if the run is
        discarded; None without such data.
        """
        if not self.eval_samples.counts[0]:
            return None
        generators, before = generator_states((self.backend.kind,)), replace(self.pager.stats)
        try:
            return self._evaluate(before)
        finally:
            restore_generators(generators)

    def _evaluate(self, before: PagerStats) -> Evaluation:
        total = metric = 0.0
        has_metric = False
        (count,) = self.eval_samples.counts
        size = BucketSize(count, self.manifest.batch_size)
        batches = [range(start, min(start + size.batch_size, count)) for start in range(0, count, size.batch_size)]
        if self.options.discard:
            batches = list({len(rows): rows for rows in batches}.values())
        for rows in batches:
            report = self._run(graph_name("eval", len(rows), size), self.eval_samples.batch([*rows]), [])
            total += report.loss.item() * len(rows)
            if report.aux and report.aux[0].numel() == 1:
                has_metric = True
                metric += float(report.aux[0].item()) * len(rows)
        seen = sum(map(len, batches))
        loss = total / seen
        best = loss < self.best_loss
        if best:
            self.best_loss = loss
        paging = self.pager.stats.since(before)
        return Evaluation(self.step, loss, metric / seen if has_metric else None, best, paging)

    def save_weights(self, path: Path) -> str:
        """Write the model's state as safetensors, atomically; return the file's checksum. Raises ResultError.

        Names are those of `model.state_dict()`, with tied tensors once; read the file with
        `safetensors.torch.load_model`.
        """
        return save_result(self.bundle, self.persistents, self.step, path)

    def digest(self) -> str:
        """Return a checksum over every persistent tensor, names included; equal digests mean equal bits."""
        total = xxhash.xxh3_128()
        for key in self.manifest.state:
            total.update(key.encode())
            for chunk in self.persistents.chunks_of(key):
                total.update(chunk)
        return total.hexdigest()


def step_message(event: StepEvent, device_peak_bytes: int | None = None, device_excess_bytes: int = 0) -> StepDone:
    """Return a step in the form that is reported to the supervisor."""
    paging, packing = event.paging, event.report.packing
    waits_and_transfers = {
        "stall": paging.stall_seconds,
        "page_in": paging.read_seconds,
        "page_out": paging.write_seconds,
    }
    return StepDone(
        step=event.step, epoch=event.epoch, loss=event.loss, wall_s=event.wall_s, cpu_s=event.cpu_s,
        phases_s={**event.report.phases_s, **waits_and_transfers}, paged_in_bytes=paging.read_bytes,
        paged_out_bytes=paging.written_bytes, unworn_bytes=paging.unworn_bytes, transfer_s=paging.busy_seconds,
        hidden_s=max(0.0, paging.busy_seconds - paging.stall_seconds), peak_rss_bytes=peak_resident_bytes(),
        device_peak_bytes=device_peak_bytes, device_excess_bytes=device_excess_bytes, packed_bytes=packing.packed_bytes, packed_from_bytes=packing.source_bytes - packing.spilled_bytes,
        packing_overflows=len(packing.overflows), planned_s=event.planned_s, planned_compute_s=event.planned_compute_s, planned_joules=event.planned_joules,
    )  # fmt: skip
