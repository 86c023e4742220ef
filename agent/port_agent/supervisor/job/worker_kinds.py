"""How the worker of each kind of job is started, and what its bundle contains: the
supervisor's two interfaces to jobs.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from port_agent.federate.orders import MODEL_FILE, RESULT_FILE, RESULT_PART_FILE, START_FILE, STATE_FOLDER, has_round
from port_agent.jobs.job import Job, JobKind
from port_agent.supervisor.job.bundle_check import check_command
from port_agent.supervisor.job.plan_choice import PlanFigures, checkpoint_interval_s
from port_agent.system.helper_process import HelperCommand
from port_agent.system.python_process import threads_environment
from port_agent.worker.worker_options import (
    BOARD_WORKER,
    CONTROL_FD_PLACE,
    FINETUNE_WORKER,
    TORCH_WORKER,
    WorkerOptions,
    page_words,
    weights_words,
)
from port_planner.base.errors import PortError
from port_planner.ir.costs import Speeds
from port_planner.ir.device_kinds import CPU, CUDA, MPS

LOOKED_FOR = (CUDA, MPS)
"""Kinds of devices that the sensors detect; the worker itself reports whether others exist."""

CHECKPOINT_EVERY_STEPS = 50
"""Steps between checkpoints until the costs of a step and of a checkpoint are known."""


@dataclass(frozen=True, slots=True)
class BundleFacts:
    """What the supervisor needs to know about a bundle."""

    plans: tuple[PlanFigures, ...] = ()
    threads: int = 1
    """Number of threads, fixed when the bundle was made: another number sums in another order."""
    steps_per_epoch: int | None = None
    """Batches in one pass over the bundle's own samples."""
    deadline_at: float | None = None
    """Unix time of its planned end."""
    revised: Path | None = None
    """File of the plans that were made again for this bundle; None: the bundle's own plans."""
    revised_for: Speeds | None = None
    """The speeds for which those plans were made."""
    device_kind: str = CPU
    """Kind of device that computes the steps."""
    reads_files: tuple[str, ...] = ()
    """The user's files, outside the bundle, that its job reads during training."""
    known_steps: int | None = None
    """Batches for which its optimizer's numbers are known; None: all."""
    follows_losses: bool = False
    """Whether its learning rates follow the mean losses of its epochs."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A kind of worker: the beginning of its command, how to read its bundle, and what its environment needs."""

    program: tuple[str, ...]
    read_bundle: Callable[[Path], BundleFacts]
    environment: Callable[[BundleFacts, PlanFigures | None], Mapping[str, str]]
    lacks: Callable[[], str] = str
    """Function that returns what the worker lacks on this machine, and why; empty if nothing is missing."""
    check: Callable[[Path], HelperCommand] | None = None
    """Reads a bundle completely, in a process that fails if it is damaged."""


def no_facts(bundle: Path) -> BundleFacts:
    """Return no facts: the worker needs no plans, or knows better."""
    return BundleFacts()


def no_environment(facts: BundleFacts, plan: PlanFigures | None) -> Mapping[str, str]:
    """Return no variables beyond the agent's own environment."""
    return {}


def torch_environment(facts: BundleFacts, plan: PlanFigures | None) -> Mapping[str, str]:
    """Return the environment of a torch worker: its allocator, which must be loaded at the start,
    and its number of threads.
    """
    from port_agent.malloc import preload_environment

    allocator = preload_environment(plan.peak_bytes if plan else None)
    return {**allocator, **threads_environment(facts.threads)}


def torch_lacks() -> str:
    """Return why the torch worker runs without its allocator here, or an empty text."""
    from port_agent.malloc import preload_trouble

    return preload_trouble()


def read_training_bundle(bundle: Path) -> BundleFacts:
    """Return the frontier of a training bundle.

    Raises PortError if it is broken, OSError if it is unreadable.
    """
    from port_planner.ir.bundle.bundle import read_manifest
    from port_planner.ir.bundle.revision import read_revised_choices, revision_path

    manifest = read_manifest(bundle)
    choices, speeds, revised = manifest.plans, None, revision_path(bundle)
    with contextlib.suppress(PortError, OSError):  # without a sound revision the bundle's own plans are as good as ever
        choices, speeds = read_revised_choices(revised)
    plans = tuple(
        PlanFigures(
            index,
            max(plan.peak_bytes, plan.ram_bytes),
            plan.seconds,
            plan.joules,
            plan.written_bytes,
            plan.wear_joules,
            plan.device_ram_bytes,
        )
        for index, plan in enumerate(choices)
    )
    return BundleFacts(
        plans,
        manifest.threads,
        manifest.steps_per_epoch(),
        manifest.limits.deadline_at,
        None if speeds is None else revised,
        speeds,
        manifest.device_kind,
        tuple(sorted({part.path for part in manifest.files.values()})),
        None if manifest.known_updates is None else manifest.known_updates * manifest.accumulate,
        manifest.plateau is not None,
    )


def read_finetune_job(bundle: Path) -> BundleFacts:
    """Return the budget of a fine-tuning as its only plan.

    Raises PortError for a file that is not a job, OSError if unreadable.
    """
    from port_agent.finetuning.job_file import FinetuneJob

    job = FinetuneJob.read(bundle)
    return BundleFacts((PlanFigures(0, job.ram_bytes),), job.threads)


def proximal_mu(job: Job, bundle: Path | None) -> float:
    """Return the factor of the proximal term with which a job trains; 0 for none.

    Raises PortError and OSError as the readers of facts do.
    """
    if bundle is None:
        return 0.0
    if job.spec.kind is JobKind.FINETUNE:
        from port_agent.finetuning.job_file import FinetuneJob

        return FinetuneJob.read(bundle).options.proximal_mu or 0.0
    from port_planner.ir.bundle.bundle import read_manifest

    term = read_manifest(bundle).proximal
    return 0.0 if term is None else term.mu


DEFAULT_KINDS: Mapping[JobKind, WorkerKind] = {
    JobKind.TRAIN: WorkerKind(TORCH_WORKER, read_training_bundle, torch_environment, torch_lacks, check_command),
    JobKind.MCU: WorkerKind(BOARD_WORKER, no_facts, no_environment),
    JobKind.FINETUNE: WorkerKind(FINETUNE_WORKER, read_finetune_job, no_environment, torch_lacks),
}


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files and directories of one run of a job."""

    job_dir: Path
    bundle: Path | None
    data: Path | None = None
    round: int | None = None
    federation: Path | None = None
    """Directory in which a round of a federation begins and ends."""

    @property
    def state(self) -> Path:
        """Directory of the job's checkpoints."""
        return self.job_dir / "state" if self.federation is None else self.federation / STATE_FOLDER

    @property
    def out(self) -> Path:
        """File for the trained weights."""
        return self.job_dir / "out.safetensors" if self.federation is None else self.federation / RESULT_FILE

    @property
    def weights(self) -> Path | None:
        """Initial weights instead of the bundle's.

        Without a round to train, the average from which a fine-tuning makes its result.
        """
        if self.federation is None:
            return None
        return self.federation / (START_FILE if has_round(self.federation) else MODEL_FILE)


def worker_command(
    kind: WorkerKind,
    job: Job,
    paths: RunPaths,
    plan: int | None,
    checkpoint_every: int | None,
    *,
    revised: Path | None = None,
) -> tuple[str, ...]:
    """Return the worker's command line; `{control_fd}` is replaced when the process starts."""
    spec, number, out = job.spec, paths.round, paths.out
    if paths.federation is not None and has_round(paths.federation):
        number = job.rounds
        if spec.kind is JobKind.FINETUNE:
            out = paths.federation / RESULT_PART_FILE
    options = WorkerOptions(
        bundle=paths.bundle or paths.job_dir,
        state_dir=paths.state,
        plan=plan,
        data=paths.data,
        epochs=spec.epochs,
        steps=spec.steps,
        out=out,
        checkpoint_every=checkpoint_every,
        round=number,
        user=spec.owner,
    )
    revision = () if revised is None else ("--revision", str(revised))
    return (
        *kind.program,
        *options.words(),
        *page_words(spec.page_dirs),
        *weights_words(paths.weights),
        *revision,
        "--control-fd",
        CONTROL_FD_PLACE,
        *spec.arguments,
    )


def checkpoint_steps(job: Job, flash_budget_bytes_per_day: int) -> int | None:
    """Return the number of steps between the worker's checkpoints; None leaves the choice to the worker."""
    if job.spec.checkpoint_every is not None or job.spec.kind is not JobKind.TRAIN:
        return job.spec.checkpoint_every
    measured = job.measured
    if not measured.step_s or measured.checkpoint_s is None:
        return CHECKPOINT_EVERY_STEPS
    every_s = checkpoint_interval_s(measured.checkpoint_s, measured.checkpoint_bytes, flash_budget_bytes_per_day)
    return max(1, round(every_s / measured.step_s))


def bundle_path(job: Job, job_dir: Path) -> Path | None:
    """Return the path of the job's bundle: its own copy, or a file on this device."""
    return None if job.spec.bundle is None else job_dir / job.spec.bundle
