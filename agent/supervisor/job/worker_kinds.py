"""How the worker of each kind of job is started, and what its bundle offers.

The two seams of the supervisor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.jobs.model import Job, JobKind
from agent.supervisor.job.plan_choice import PlanFigures, checkpoint_interval_s
from agent.worker.options import (
    BOARD_WORKER,
    CONTROL_FD_PLACE,
    FINETUNE_WORKER,
    TORCH_WORKER,
    WorkerOptions,
    page_words,
)

CHECKPOINT_EVERY_STEPS = 50
"""Until the cost of a step and of a checkpoint is known."""


@dataclass(frozen=True, slots=True)
class BundleFacts:
    """What the supervisor needs to know of a bundle."""

    plans: tuple[PlanFigures, ...] = ()
    threads: int = 1
    """Fixed when the bundle was made: another number of threads sums in another order."""
    steps_per_epoch: int | None = None
    """Batches in one pass over the bundle's own samples."""
    deadline_at: float | None = None
    """Unix time by which it was planned to be done."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """One kind of worker.

    The start of its command, how to read its bundle, and what its environment needs.
    """

    program: tuple[str, ...]
    read_bundle: Callable[[Path], BundleFacts]
    environment: Callable[[BundleFacts, PlanFigures | None], Mapping[str, str]]
    lacks: Callable[[], str] = str
    """What its environment cannot have on this machine, and why; empty when nothing is missing."""


def no_facts(bundle: Path) -> BundleFacts:
    """Return nothing: the worker needs no plans, or knows better."""
    return BundleFacts()


def no_environment(facts: BundleFacts, plan: PlanFigures | None) -> Mapping[str, str]:
    """Return nothing beyond the agent's own environment."""
    return {}


def torch_environment(facts: BundleFacts, plan: PlanFigures | None) -> Mapping[str, str]:
    """Return the environment of a torch worker.

    Its allocator, which must be there from the start, and its threads.
    """
    from agent.malloc import preload_environment

    threads = str(facts.threads)
    allocator = preload_environment(plan.peak_bytes if plan else None)
    return {**allocator, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def torch_lacks() -> str:
    """Return why the torch worker runs without its allocator here, or nothing."""
    from agent.malloc import preload_trouble

    return preload_trouble()


def read_training_bundle(bundle: Path) -> BundleFacts:
    """Return the frontier of a training bundle.

    Raises PortError when it is broken, OSError when unreadable.
    """
    from planner.ir.bundle.bundle import read_manifest

    manifest = read_manifest(bundle)
    plans = tuple(
        PlanFigures(
            index, max(plan.peak_bytes, plan.ram_bytes), plan.seconds, plan.joules, plan.written_bytes, plan.wear_joules
        )
        for index, plan in enumerate(manifest.plans)
    )
    return BundleFacts(plans, manifest.threads, manifest.steps_per_epoch(), manifest.limits.deadline_at)


def read_finetune_job(bundle: Path) -> BundleFacts:
    """Return the budget of a fine-tuning as its only plan. Raises PortError when it is none, OSError when unreadable."""
    from agent.finetune.job.file import FinetuneJob

    job = FinetuneJob.read(bundle)
    return BundleFacts((PlanFigures(0, job.ram_bytes),), job.threads)


DEFAULT_KINDS: Mapping[JobKind, WorkerKind] = {
    JobKind.TRAIN: WorkerKind(TORCH_WORKER, read_training_bundle, torch_environment, torch_lacks),
    JobKind.MCU: WorkerKind(BOARD_WORKER, no_facts, no_environment),
    JobKind.FINETUNE: WorkerKind(FINETUNE_WORKER, read_finetune_job, no_environment, torch_lacks),
}


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Where one run of a job finds its things."""

    job_dir: Path
    bundle: Path | None
    data: Path | None = None
    round: int | None = None
    state: Path = field(init=False)
    out: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", self.job_dir / "state")
        object.__setattr__(self, "out", self.job_dir / "out.safetensors")


def worker_command(
    kind: WorkerKind, job: Job, paths: RunPaths, plan: int | None, checkpoint_every: int | None
) -> tuple[str, ...]:
    """Return the worker's command line; `{control_fd}` is filled in when the process starts."""
    spec = job.spec
    options = WorkerOptions(
        bundle=paths.bundle or paths.job_dir, state_dir=paths.state, plan=plan, data=paths.data, epochs=spec.epochs,
        steps=spec.steps, out=paths.out, checkpoint_every=checkpoint_every, round=paths.round, user=spec.owner,
    )  # fmt: skip
    return (
        *kind.program, *options.words(), *page_words(spec.page_dirs), "--control-fd", CONTROL_FD_PLACE, *spec.arguments
    )  # fmt: skip


def checkpoint_steps(job: Job, flash_budget_bytes_per_day: int) -> int | None:
    """Return after how many steps the worker makes a checkpoint on its own; None leaves it to the worker."""
    if job.spec.checkpoint_every is not None or job.spec.kind is not JobKind.TRAIN:
        return job.spec.checkpoint_every
    measured = job.measured
    if not measured.step_s or measured.checkpoint_s is None:
        return CHECKPOINT_EVERY_STEPS
    every_s = checkpoint_interval_s(measured.checkpoint_s, measured.checkpoint_bytes, flash_budget_bytes_per_day)
    return max(1, round(every_s / measured.step_s))


def bundle_path(job: Job, job_dir: Path) -> Path | None:
    """Return where the job's bundle lies: its own copy, or a path on this device."""
    return None if job.spec.bundle is None else job_dir / job.spec.bundle
