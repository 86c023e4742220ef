"""Training of a bundle in the foreground."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from port_agent.foreground.run import ForegroundRun, OnEvent, TrainReport, no_listener
from port_agent.planning.request import RequestError
from port_agent.supervisor.job.plan_choice import data_limit, resident_max
from port_agent.system.memory_limit import limit_data_of
from port_agent.worker.start import start_worker, torch_worker
from port_agent.worker.worker_options import TorchOptions
from port_planner.ir.bundle.bundle import read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """A bundle to train; a request with the same `state_dir` resumes from the last checkpoint.

    The settings are those of `port-agent train`, whose help explains each.
    """

    bundle: Path
    epochs: int | None = None
    """Passes over the data, counted from the beginning; None: one, or as many as `steps` needs."""
    steps: int | None = None
    """Batches instead of epochs."""
    out: Path | None = None
    """File for the trained weights (safetensors); None: they stay in the state."""
    state_dir: Path | None = None
    """Directory of checkpoints; None: next to the bundle, NAME.state."""
    page_dirs: tuple[Path, ...] = ()
    """A directory on each medium that was planned for, in that order; none: `state_dir`."""
    plan: int = 0
    """Number of the plan in the bundle, from 0."""
    verified_steps: int = 0
    """Number of first steps whose losses must equal plain PyTorch's."""
    checkpoint_every: int = 1
    """Steps between checkpoints."""
    read_bytes_per_s: int | None = None
    """Throttles page-in; None: no limit."""
    write_bytes_per_s: int | None = None
    digest: bool = False
    """Whether the report includes a checksum over weights and optimizer state."""


def start_train(request: TrainRequest) -> ForegroundRun:
    """Start the worker of a request, within the memory of its plan. Raises BundleError, RequestError and OSError."""
    manifest = read_manifest(request.bundle)
    if not 0 <= request.plan < len(manifest.plans):
        raise RequestError(
            f"{request.bundle} has {len(manifest.plans)} plans, counted from 0; there is no plan {request.plan}"
        )
    options = TorchOptions(
        bundle=request.bundle,
        state_dir=request.state_dir or request.bundle.with_suffix(".state"),
        plan=request.plan,
        verify=request.verified_steps,
        checkpoint_every=request.checkpoint_every,
        steps=request.steps,
        epochs=request.epochs,
        out=request.out,
        page_dir=next(iter(request.page_dirs), None),
        scratch_dirs=request.page_dirs[1:],
        digest=request.digest,
        read_limit=request.read_bytes_per_s,
        write_limit=request.write_bytes_per_s,
    )
    peak_bytes = manifest.plans[request.plan].peak_bytes
    worker = start_worker(torch_worker(options), limit_bytes=peak_bytes, threads=manifest.threads)
    with contextlib.suppress(OSError):  # it has ended: its events give the reason
        limit_data_of(worker.process.pid, data_limit(peak_bytes))
    return ForegroundRun(worker, resident_max(peak_bytes))


def train(request: TrainRequest, on_event: OnEvent = no_listener) -> TrainReport:
    """Train a bundle in a separate process to its end, or after Ctrl-C to the end of a step.

    Raises BundleError, RequestError, OSError, and TrainingFailedError with the worker's reason.
    """
    with start_train(request) as run:
        return run.finish(on_event)
