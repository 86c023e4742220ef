"""Run a bundle: batches, steps, commits, evaluation, resume. The worker's inside; single-threaded but for the page thread."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from agent.system.atomic_file import publish
from agent.train.bundle_samples import Samples
from agent.train.checkpoint import Commit, StateStore
from agent.train.executor import Executor, StepReport
from agent.train.incoming_samples import Arrivals, DataError
from agent.train.pager import CorruptPageError, Pager, PagerStats
from agent.train.resident_state import Persistents, bundle_chunks, initial_contents
from agent.train.step_paging import Scratch
from agent.worker.protocol import StepDone
from planner.ir.bundle.bundle import Bundle
from planner.ir.bundle.data_order import batch_rows
from planner.ir.bundle.safetensors_io import encode
from planner.ir.errors import ExitCode, PortError
from planner.ir.lowering.lower import lower
from planner.ir.lowering.optimizer_scalars import OptimizerSpec, StepScalars
from planner.ir.process_memory import peak_resident_bytes
from planner.ir.program import Program


class MismatchError(PortError):
    """The first steps gave other numbers than plain PyTorch did where the bundle was made."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a bundle is to be run. `steps` counts batches; None: as many as `epochs` take.

    `data`: train on the samples of this directory instead of the bundle's. `round`: when it differs from the last
    checkpoint's, epochs count anew while weights and optimizer go on.
    """

    state_dir: Path
    page_dir: Path
    plan: int = 0
    steps: int | None = None
    epochs: int = 1
    data: Path | None = None
    round: int = 0
    checkpoint_every: int = 1
    verify: int = 0
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None


@dataclass(slots=True)
class StepEvent:
    """What one step did, for reports and for the supervisor."""

    step: int
    epoch: int
    loss: float
    wall_s: float
    cpu_s: float
    report: StepReport = field(repr=False)
    planned_s: float = 0.0
    planned_compute_s: float = 0.0
    """Of it, what the operators take, recomputation included."""
    planned_joules: float | None = None
    paging: PagerStats = field(default_factory=PagerStats)
    """What the page thread did during the step, what the program found in the wrong place included."""


@dataclass(slots=True)
class Evaluation:
    """Loss and metric over the evaluation data; `best`: the lowest loss so far."""

    step: int
    loss: float
    metric: float | None
    best: bool
    paging: PagerStats = field(default_factory=PagerStats)


class Trainer:
    """One job in progress."""

    def __init__(self, bundle: Bundle, options: TrainOptions) -> None:
        self.bundle, self.options, self.manifest = bundle, options, bundle.manifest
        torch.set_num_threads(self.manifest.threads)
        options.state_dir.mkdir(parents=True, exist_ok=True)
        options.page_dir.mkdir(parents=True, exist_ok=True)
        self.pager = Pager(read_bytes_per_s=options.read_bytes_per_s, write_bytes_per_s=options.write_bytes_per_s)
        sizes = {s.key: s.nbytes for g in bundle.graphs.values() for s in g.storages if s.persistent}
        self.store = StateStore(options.state_dir, sizes, self.pager, job=bundle.id)
        self.persistents = Persistents(self.store, self.manifest.layouts)
        self.samples: Samples | Arrivals = Samples(bundle, "train/")
        if options.data is not None:
            columns = [bundle.data[f"train/{i}"] for i in range(len(self.manifest.batch))]
            self.samples = Arrivals(options.data, columns, options.state_dir)
        self.eval_samples = Samples(bundle, "eval/")
        self.constants = {
            k: torch.cat(list(initial_contents(bundle, k, m.nbytes)) or [torch.empty(0, dtype=torch.uint8)])
            for k, m in bundle.tensors.items()
            if k.startswith("constant/")
        }
        self.scratch: dict[str, Scratch] = {}
        self._programs: dict[tuple[int, str], Program] = {}
        self._executors: dict[tuple[int, str], Executor] = {}
        self.plan_index = options.plan
        self.interrupted = False
        self.gate: Callable[[], None] = lambda: None
        spec = self.manifest.optimizer
        self.scalars = StepScalars(OptimizerSpec(spec["name"], tuple(spec["groups"])))
        self.step = 0
        self.best_loss = math.inf
        self.uncommitted = 0
        self.commit_bytes = 0
        """What the last commit wrote beside the step's own paging."""

    # -- beginning and end

    def start(self) -> Commit:
        """Take up the last commit, or begin."""
        commit = self.store.open()
        if commit is None:
            torch.manual_seed(self.manifest.seed)
            sizes = self.store.sizes
            commit = self.store.create(lambda key: initial_contents(self.bundle, key, sizes[key]), self._progress())
        self._restore(commit)
        return commit

    def _restore(self, commit: Commit) -> None:
        self.step = commit.step if commit.progress.get("round", 0) == self.options.round else 0
        self.scalars.steps_done = commit.progress["updates"]
        self.best_loss = commit.progress["best_loss"]
        torch.set_rng_state(torch.frombuffer(bytearray(commit.progress["rng"]), dtype=torch.uint8))
        self.persistents.forget()
        self.uncommitted = 0

    def _progress(self) -> dict[str, Any]:
        return {
            "updates": self.scalars.steps_done,
            "best_loss": self.best_loss,
            "round": self.options.round,
            "rng": torch.get_rng_state().numpy().tobytes(),
        }

    def close(self) -> None:
        """Stop the page thread and drop scratch files; uncommitted steps are lost."""
        self.pager.close()
        for scratch in self.scratch.values():
            scratch.close()
        self.store.close()
        self.samples.close()
        self.eval_samples.close()

    # -- programs

    def program(self, name: str) -> Program:
        """Return the program of one graph under the present plan; a plan over its budget is refused here."""
        key = (self.plan_index, name)
        if key not in self._programs:
            plan = self.bundle.plans[self.plan_index][name]
            self._programs[key] = lower(self.bundle.graphs[name], self.bundle.costs[name], plan)
        return self._programs[key]

    def _executor(self, name: str) -> Executor:
        key = (self.plan_index, name)
        if key not in self._executors:
            if name not in self.scratch:
                self.scratch[name] = Scratch(self.options.page_dir / f"scratch-{name}.pages")
            executor = Executor(
                self.program(name), self.constants, self.persistents.resident, self.store, self.pager,
                self.scratch[name],
            )  # fmt: skip
            self._executors[key] = executor
        executor = self._executors[key]
        executor.interrupted, executor.gate = self.interrupted, self._pass_gate
        return executor

    def interrupt(self) -> None:
        """Make `gate` be called before the next instruction; any thread may do so."""
        self.interrupted = True
        for executor in list(self._executors.values()):
            executor.interrupted = True

    def _pass_gate(self) -> None:
        self.gate()
        self.interrupted = False
        for executor in self._executors.values():
            executor.interrupted = False

    def use_plan(self, index: int) -> None:
        """Switch to another plan of the frontier, from the next step on.

        Raises PortError where the bundle has no such plan.
        """
        if not 0 <= index < len(self.bundle.plans):
            raise PortError(f"the bundle has no plan {index}; it has {len(self.bundle.plans)}")
        self.plan_index = index

    @property
    def planned_peak_bytes(self) -> int:
        return max(self.program(name).peak_bytes for name in self.bundle.graphs)

    # -- training

    def train(self, on_step: Callable[[StepEvent], None], on_commit: Callable[[Commit, float], None]) -> None:
        """Run until `options.steps` batches are done in all; a damaged block restarts from the last good commit."""
        total = self.total_steps
        while self.step < total:
            try:
                self._train_until(total, on_step, on_commit)
            except CorruptPageError as error:
                if error.path == self.store.file.path:
                    self.store.discard_latest()
                commit = self.store.open()
                if commit is None:
                    raise
                self._restore(commit)

    @property
    def total_steps(self) -> int:
        steps = self.options.steps
        return self.options.epochs * self.steps_per_epoch if steps is None else steps

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the samples."""
        full, rest = divmod(self.samples.count, self.manifest.batch_size)
        return full + (1 if rest and not self._drop_last(rest) else 0)

    def _drop_last(self, rest: int) -> bool:
        """Say whether the last, short batch is left out: as the job says, or because no plan was made for its size."""
        known = any(name.endswith(f"@{rest}") and not name.startswith("eval") for name in self.bundle.graphs)
        return self.manifest.drop_last or not known

    def _train_until(
        self, total: int, on_step: Callable[[StepEvent], None], on_commit: Callable[[Commit, float], None]
    ) -> None:
        m = self.manifest
        count = self.samples.count
        if self.steps_per_epoch == 0:
            raise DataError(f"{count} samples are too few for a batch of {m.batch_size}; wait for more")
        drop_last = self._drop_last(count % m.batch_size)
        batches = batch_rows(m.seed, count, m.batch_size, drop_last=drop_last, start=self.step)
        for epoch, rows in batches:
            if self.step >= total:
                return
            if self.interrupted:
                self._pass_gate()
            event = self._one_step(epoch, self.samples.batch(rows.tolist()))
            on_step(event)
            if self.uncommitted >= self.options.checkpoint_every or self.step == total:
                self.commit(on_commit)

    def commit(self, on_commit: Callable[[Commit, float], None]) -> None:
        """Make the steps so far durable, if there are any that are not."""
        if not self.uncommitted:
            return
        begin, written = time.perf_counter(), self.pager.stats.written_bytes
        commit = self.persistents.commit(self.step, self._progress())
        self.uncommitted = 0
        self.commit_bytes = self.pager.stats.written_bytes - written
        on_commit(commit, time.perf_counter() - begin)

    def _one_step(self, epoch: int, batch: list[torch.Tensor]) -> StepEvent:
        m = self.manifest
        kind = _kind(self.step, m.accumulate)
        rows = batch[0].shape[0]
        name = kind if rows == m.batch_size else f"{kind}@{rows}"
        scalars: list[float | int] = []
        if kind in ("step", "last"):
            self._apply_schedule()
            scalars = self.scalars.advance()
        wall, cpu = time.perf_counter(), time.process_time()
        before = replace(self.pager.stats)
        report = self._run(name, batch, scalars)
        self.step += 1
        self.uncommitted += 1
        loss = report.loss.item()
        program = self.program(name)
        event = StepEvent(
            self.step, epoch, loss, time.perf_counter() - wall, time.process_time() - cpu, report,
            program.seconds, program.compute_seconds, program.joules, self.pager.stats.since(before),
        )  # fmt: skip
        self._verify(loss)
        return event

    def _run(self, name: str, batch: list[torch.Tensor], scalars: list[float | int]) -> StepReport:
        program = self.program(name)
        self.persistents.prepare(program)
        report = self._executor(name).run(batch, scalars)
        self.persistents.stepped(program)
        return report

    def _apply_schedule(self) -> None:
        schedule = self.manifest.schedule
        if schedule:
            update = min(self.scalars.steps_done, len(schedule) - 1)
            groups = [{**g, **s} for g, s in zip(self.manifest.optimizer["groups"], schedule[update], strict=True)]
            self.scalars.set_groups(groups)

    def _verify(self, loss: float) -> None:
        losses = self.manifest.reference.get("losses", [])
        if self.step > min(self.options.verify, len(losses)):
            return
        expected = float.fromhex(losses[self.step - 1])
        if loss != expected and not (math.isnan(loss) and math.isnan(expected)):
            raise MismatchError(
                f"step {self.step} gave the loss {loss!r}, plain PyTorch gave {expected!r} where the job was planned "
                f"(difference {abs(loss - expected):.2e}); on another kind of processor small differences are normal: "
                "plan the job on this machine, or train with --verify 0"
            )

    # -- evaluation and results

    def evaluate(self) -> Evaluation | None:
        """Return loss and metric over the evaluation data; None where the bundle has none."""
        if not self.eval_samples.count:
            return None
        generator, before = torch.get_rng_state(), replace(self.pager.stats)
        total = metric = 0.0
        has_metric = False
        size = self.manifest.batch_size
        for start in range(0, self.eval_samples.count, size):
            rows = list(range(start, min(start + size, self.eval_samples.count)))
            name = "eval" if len(rows) == size else f"eval@{len(rows)}"
            report = self._run(name, self.eval_samples.batch(rows), [])
            total += report.loss.item() * len(rows)
            if report.aux and report.aux[0].numel() == 1:
                has_metric = True
                metric += float(report.aux[0].item()) * len(rows)
        torch.set_rng_state(generator)
        count = self.eval_samples.count
        loss = total / count
        best = loss < self.best_loss
        if best:
            self.best_loss = loss
        paging = self.pager.stats.since(before)
        return Evaluation(self.step, loss, metric / count if has_metric else None, best, paging)

    def save_weights(self, path: Path) -> int:
        """Write the model's state as safetensors, atomically; return the bytes written.

        Names are those of `model.state_dict()`, tied tensors once: read it with `safetensors.torch.load_model`.
        """
        keys = {name: self.bundle.result_key(name) for name in self.manifest.result}
        tensors = self.persistents.chunks([k for k in keys.values() if k in self.manifest.layouts])
        tensors |= {name: bundle_chunks(self.bundle, k) for name, k in keys.items() if name not in tensors}
        temporary = path.with_name(path.name + ".new")
        written = 0
        with open(temporary, "wb") as stream:
            for piece in encode(tensors, {"format": "pt", "step": str(self.step)}):
                written += stream.write(piece)
        publish(temporary, path)
        return written

    def digest(self) -> str:
        """Return a checksum over every persistent tensor, names included; equal digests mean equal bits."""
        total = xxhash.xxh3_128()
        for key in sorted(self.manifest.layouts):
            total.update(key.encode())
            for piece in self.persistents.pieces(key):
                total.update(piece)
        return total.hexdigest()


def _kind(step: int, accumulate: int) -> str:
    if accumulate == 1:
        return "step"
    place = step % accumulate
    return "first" if place == 0 else "last" if place == accumulate - 1 else "next"


def step_message(event: StepEvent) -> StepDone:
    """Return a step as the supervisor hears of it."""
    paging = event.paging
    waits_and_transfers = {
        "stall": paging.stall_seconds,
        "page_in": paging.read_seconds,
        "page_out": paging.write_seconds,
    }
    return StepDone(
        step=event.step, epoch=event.epoch, loss=event.loss, wall_s=event.wall_s, cpu_s=event.cpu_s,
        phases_s={**event.report.phases_s, **waits_and_transfers}, paged_in_bytes=paging.read_bytes,
        paged_out_bytes=paging.written_bytes, transfer_s=paging.busy_seconds,
        hidden_s=max(0.0, paging.busy_seconds - paging.stall_seconds), peak_rss_bytes=peak_resident_bytes(),
        planned_s=event.planned_s, planned_compute_s=event.planned_compute_s, planned_joules=event.planned_joules,
    )  # fmt: skip
