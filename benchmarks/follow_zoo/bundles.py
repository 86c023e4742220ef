"""The zoo's models as jobs: captured, planned, trained by a worker, and compared with plain PyTorch to the bit.

What a batch holds besides tensors with a row per sample stays the same in all batches, as it would in a job. What a
bundle refuses by name is left out, as the job's author would by the option that the model has for it: every row is
padded, for whether a batch has padding at all decides in many models which operators run; no whole layers are dropped
at random; and speech models mask no spans of time, for which they draw from numpy.
"""

import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.follow_zoo import programs
from benchmarks.follow_zoo.compare import AMPLE, Outcome, Verdict, digest_of, first_difference, said, seed, state
from port_agent.energy.sources.power_models import power_with
from port_agent.prepare.measurement.dry_run import DryRunError, DryRunWorkers
from port_agent.prepare.referee.plain_run import recorded_reads
from port_agent.prepare.referee.unchanged_steps import unchanged_updates
from port_agent.prepare.reference import compared_steps, with_expected_results
from port_agent.training.comparison import processor, tensor_checksum
from port_planner import make_bundle
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.bundle.manifest import ExpectedResults, PlanChoice
from port_planner.ir.costs import CostTable, DeviceCosts, Flash
from port_planner.ir.device_kinds import CPU
from port_planner.ir.plan import Plan
from port_planner.ir.torch_arithmetic import arithmetic
from port_planner.job import TrainingJob
from port_planner.make_bundle import CapturedJob, InfeasibleError
from port_planner.plain_steps import dropped_optimizer_state, model_state, plain_losses
from port_planner.profiling.operator_profile import MeasuredCosts, profile_operators
from port_planner.schedules import spelled
from port_planner.steps_ahead import known_steps

FLASH = Flash("flash", 500e6, 500e6, 1e-4, 1e-9, 1e-9)
AHEAD_WITHIN_S = 60.0
"""Seconds of the processor for the steps of a program that counts."""
PADDING = 5
STEPS = 6
"""More than `plan` compares by itself: steps after those must stay equal, too."""

MISMATCH = "plain PyTorch"
"""Part of a worker's message about a step whose numbers differ."""


@dataclass(frozen=True, slots=True)
class JobLength:
    """The number of batches that a job is trained for, and the number of those that `plan` compares;
    None: as without the script.
    """

    steps: int = STEPS
    seen_steps: int | None = None


AS_REFEREED = JobLength(44, 24)
"""For jobs whose script is run alone: all the steps that this makes if they take no time, and further ones."""


@dataclass(frozen=True, slots=True)
class BundleCase:
    """A job by name; `make_job` is called in the child."""

    name: str
    make_job: Callable[[], TrainingJob]
    length: "JobLength" = field(default_factory=lambda: JobLength())

    def judged(self, at: Callable[[str], object]) -> Outcome:
        """Judge the job; `at` receives the current stage."""
        return judge_bundle(self.name, self.make_job, at, self.length)


def cases() -> Iterator[BundleCase]:
    """Give one case per model type: the class that is most likely to have a loss."""
    from benchmarks.follow_zoo.transformers_models import tasks

    for model_type, names in sorted(tasks().items()):
        yield BundleCase(f"transformers/{model_type}/{names[0]}", partial(job_of, model_type, names[0]))


def random_cases(count: int, seed: int) -> Iterator[BundleCase]:
    """Give that many random jobs, from this seed on."""
    for i in range(seed, seed + count):
        yield BundleCase(f"job/{i}", partial(programs.job, i))


def stranger_cases() -> Iterator[BundleCase]:
    """Give the jobs of strangers' kinds."""
    from benchmarks.follow_zoo.stranger_jobs import registered

    for name, make in registered().items():
        yield BundleCase(name, make, AS_REFEREED)


def job_of(model_type: str, class_name: str) -> TrainingJob:
    """Return the training of a tiny model as a job of `STEPS` batches."""
    from benchmarks.follow_zoo.inputs import batch_for
    from benchmarks.follow_zoo.transformers_models import find_recipe, loss_of, make

    warnings.simplefilter("ignore")
    reach, wanted = find_recipe(model_type, class_name)
    seed()
    model = make(model_type, class_name, reach)
    for module in model.modules():
        if isinstance(getattr(module, "layerdrop", None), float):
            setattr(module, "layerdrop", 0.0)  # noqa: B010  (what torch types as a tensor or a module)
        config: Any = getattr(module, "config", None)
        if hasattr(config, "apply_spec_augment"):
            config.apply_spec_augment = False
    batches = [_padded(batch_for(model, wanted)) for _ in range(STEPS)]
    rows = _rows(batches[0])
    names = [k for k, v in batches[0].items() if isinstance(v, Tensor) and v.dim() and len(v) == rows]
    fixed = {k: v for k, v in batches[0].items() if k not in names}

    def loss_fn(model: nn.Module, *columns: Tensor) -> Tensor:
        return loss_of(model(**dict(zip(names, columns, strict=True)), **fixed))

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    data = [torch.cat([b[name] for b in batches]) for name in names]
    return TrainingJob(model, loss_fn, optimizer, data, rows, clip_grad_norm=1.0, name=model_type)


def _rows(batch: dict[str, Any]) -> int:
    return len(next(v for v in batch.values() if isinstance(v, Tensor)))


def _padded(batch: dict[str, Any]) -> dict[str, Any]:
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor):
        mask[:, -PADDING:] = 0
        mask[0, -2 * PADDING :] = 0
    return batch


def judge_bundle(
    name: str, make_job: Callable[[], TrainingJob], at: Callable[[str], object], length: JobLength = JobLength()
) -> Outcome:
    """Plan a job with all the memory it wants and with half of it, train both in workers, compare with plain PyTorch.

    A job is refused if it cannot be recorded, if later steps run other operators, or if the first steps that
    `port-agent plan` compares already differ. A difference that only later steps show is a silent error.
    """
    at("plain")
    try:
        expected = digest_of(lambda: trained(make_job(), length.steps))
    except Exception as error:
        return Outcome(name, Verdict.NOT_ELIGIBLE, f"plain PyTorch raises {said(error)}")
    difference = first_difference(expected, digest_of(lambda: trained(make_job(), length.steps)))
    if difference:
        return Outcome(name, Verdict.NOT_ELIGIBLE, f"differs from itself: {difference}")
    at("capture")
    try:
        job = _begun(make_job)
        captured = make_bundle.prepare(
            job,
            updates=length.steps // job.accumulate + 1,
            followed=compared_steps(job),
            ahead=lambda updates, schedule: known_steps(_begun(make_job), updates, AHEAD_WITHIN_S, schedule),
        )
        captured = with_expected_results(captured, compared_steps(job))
        seen_steps = length.seen_steps or compared_steps(job)
        at("follow")
        _follow(captured, _begun(make_job), seen_steps, length.steps)
        shown, captured = (_with_results(captured, make_job, steps) for steps in (seen_steps, length.steps))
    except PortError as error:
        return Outcome(name, Verdict.REFUSED, " ".join(str(error).split()), "capture")
    at("profile")
    power = power_with(1)
    measured = profile_operators(captured.graphs.values(), compute_watts=power.compute_watts)
    device = DeviceCosts("zoo", 0, power.static_watts, power.compute_watts, FLASH, 1)
    return _trained_by_worker(name, shown, captured, measured, device, at)


def _follow(captured: CapturedJob, job: TrainingJob, seen_steps: int, steps: int) -> None:
    """Look at the operators after the steps that `plan` compares, as it does. Raises ChangedStepError."""
    if captured.known is not None:
        return
    data, *further = columns = _columns(job)
    seen = seen_steps // job.accumulate
    for _ in plain_losses(job, data, seen * job.accumulate, buckets=further):
        pass
    schedule, reads = spelled(captured.job.optimizer, captured.schedule), tuple(recorded_reads(captured))
    unchanged_updates(job, columns, seen, steps // job.accumulate, AHEAD_WITHIN_S, schedule, reads)


def _columns(job: TrainingJob) -> list[list[torch.Tensor]]:
    """Return the columns of the job's samples, and of those of each bucket."""
    return [[*map(torch.as_tensor, samples)] for samples in (job.data, *(b.data for b in job.buckets))]


def _with_results(captured: CapturedJob, make_job: Callable[[], TrainingJob], steps: int) -> CapturedJob:
    """Return the captured job with plain PyTorch's results of a second job, which shares nothing with it."""
    job = _begun(make_job)
    data, *further = _columns(job)
    losses = tuple(loss.hex() for loss in plain_losses(job, data, steps, buckets=further))
    state = itertools.chain(dropped_optimizer_state(job), model_state(job))
    checksums = {key: tensor_checksum(tensor) for key, tensor in state if key in captured.layouts}
    settings = arithmetic()
    return replace(
        captured, reference=ExpectedResults(losses, settings.threads, processor(CPU), checksums, arithmetic=settings)
    )


def _begun(make_job: Callable[[], TrainingJob]) -> TrainingJob:
    """Return the job in its state at the beginning of its program, which may draw from any generator."""
    seed()
    return make_job()


def trained(job: TrainingJob, steps: int) -> Any:
    """Train a job with plain PyTorch for that many batches; return the losses, and the state to compare."""
    losses = list(plain_losses(job, [torch.as_tensor(column) for column in job.data], steps))
    return losses, state(job.model, job.optimizer)


def _trained_by_worker(
    name: str,
    shown: CapturedJob,
    captured: CapturedJob,
    measured: MeasuredCosts,
    device: DeviceCosts,
    at: Callable[[str], object],
) -> Outcome:
    need, written, done = 0, 0, []
    for setting in ("ample", "half"):
        at(setting)
        ram_bytes = AMPLE if setting == "ample" else need // 2
        try:
            ram_bytes, plans, costs = _planned(captured, measured, device, ram_bytes)
            try:
                choice = _dry_run(captured, plans, costs, ram_bytes)
            except DryRunError as error:
                if error.exit_code != ExitCode.IMPOSSIBLE:
                    raise
                verdict = Verdict.REFUSED  # by the worker, with a word: another branch, another shape
                if MISMATCH in str(error):
                    verdict = _seen_by_plan(shown, plans, costs, ram_bytes)
                return Outcome(name, verdict, " ".join(str(error).split()), setting, need)
        except PortError as error:
            return Outcome(name, Verdict.FAILED, said(error), setting, need)
        need, written = max(need, choice.peak_bytes), max(written, choice.written_bytes)
        done.append(setting)
    return Outcome(name, Verdict.EQUAL, "", "", need, 0, written, settings=tuple(done))


def _planned(
    captured: CapturedJob, measured: MeasuredCosts, device: DeviceCosts, ram_bytes: int
) -> tuple[int, Mapping[str, Plan], Mapping[str, CostTable]]:
    """Plan a job for a budget, or for the least budget that its graphs, one after another, say they need."""
    planner = make_bundle.default_planner(strategy="greedy", time_limit_s=1.0)
    while True:
        try:
            return ram_bytes, *make_bundle.plan_all(captured, measured, device, ram_bytes, planner)
        except InfeasibleError as error:
            if error.needed_bytes is None or error.needed_bytes <= ram_bytes:
                raise
            ram_bytes = error.needed_bytes


def _dry_run(
    captured: CapturedJob, plans: Mapping[str, Plan], costs: Mapping[str, CostTable], ram_bytes: int
) -> PlanChoice:
    """Write a bundle, train as many steps of it as were compared, and return what the manifest says of its plan."""
    with tempfile.TemporaryDirectory(prefix="zoo-bundle-") as folder:
        path = Path(folder) / "job.port"
        manifest = make_bundle.write(path, captured, [plans], costs, [ram_bytes], threads=1)
        DryRunWorkers(1).dry_run(path, (Path(folder),), compared=len(captured.reference.losses))
    return manifest.plans[0]


def _seen_by_plan(
    shown: CapturedJob, plans: Mapping[str, Plan], costs: Mapping[str, CostTable], ram_bytes: int
) -> Verdict:
    try:
        _dry_run(shown, plans, costs, ram_bytes)
    except DryRunError:
        return Verdict.REFUSED
    return Verdict.DIFFERS
