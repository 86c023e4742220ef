"""A bundle's first steps in a separate worker: their memory and time, and whether their numbers are right."""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from port_agent.malloc import preload_environment
from port_agent.system.helper_process import HelperCommand, HelperError, run_helper
from port_agent.system.python_process import module_environment
from port_agent.training.comparison import tensor_checksum
from port_agent.worker.protocol import (
    Event,
    LeaveNow,
    PackingProbed,
    StepDone,
    TakeWork,
    TrainingFailed,
    TrainingFinished,
    WorkerReady,
)
from port_agent.worker.start import Worker, start_worker
from port_agent.worker.worker_options import LOADED_WORKER, TorchOptions
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.bundle.manifest import Manifest
from port_planner.ir.costs import PackingCost
from port_planner.ir.graph import Role, storage_key

DRY_RUN_STEPS = 2
"""Number of steps. The second step meets what the first left: optimizer state, pages, caches."""
_CACHE_LIMIT_BYTES = 1 << 30
"""Limit in bytes of the worker's allocator, live and cached blocks together; it is not the plan's peak,
which the dry run must find.
"""


class DryRunError(PortError):
    """The plan could not be tried out; `ended` is the exit code of the worker that tried."""

    def __init__(self, message: str, ended: int = ExitCode.FAILED) -> None:
        super().__init__(message)
        never = ended in (ExitCode.IMPOSSIBLE, ExitCode.DIVERGED)
        self.exit_code = ExitCode.IMPOSSIBLE if never else ExitCode.FAILED


@dataclass(frozen=True, slots=True)
class Throttle:
    """Paging speeds of the dry run's worker, in bytes per second, to try a slower medium than this machine's."""

    read_bytes_per_s: int
    write_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class DryRun:
    """The figures of a dry run.

    Peaks of resident memory include what partly touched blocks may still add. The pace is the last step's compute
    seconds divided by the planned ones. `start_bytes`: the peak before the first step, while the worker loads Python,
    torch and the bundle. `packings`: by graph, what packing takes if the run measured it; without joules.
    """

    peak_bytes: int
    start_bytes: int = 0
    pace: float = 1.0
    packings: Mapping[str, tuple[PackingCost, ...]] = field(default_factory=dict)
    device_peak_bytes: int = 0
    """Peak of the device's memory, for tensors, context and libraries; `peak_bytes` is the host's."""
    device_full: bool = False
    """Whether the dry run ended because the device had no memory left for a tensor."""


@contextlib.contextmanager
def _page_folders(page_dirs: Sequence[Path]) -> Iterator[list[Path]]:
    """Create a directory in each page directory, and delete them with their contents at the end."""
    with contextlib.ExitStack() as stack:
        yield [
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place, prefix=".port-trial-")))
            for place in page_dirs
        ]


def check_readable(result: Path, manifest: Manifest) -> None:
    """Raise DryRunError if a user could not read a result, or if a tensor differs from the script alone."""
    checksums = manifest.plain.results.checksums
    try:
        with safe_open(result, framework="pt") as stream:
            for name in manifest.result:
                found = tensor_checksum(stream.get_tensor(name))
                keys = (storage_key(Role.PARAMETER, name), storage_key(Role.BUFFER, name))
                if any(checksums.get(key, found) != found for key in keys):
                    raise DryRunError(
                        f"{name} has different bits in the result than in the script alone", ExitCode.IMPOSSIBLE
                    )
    except (SafetensorError, OSError) as error:
        raise DryRunError(f"the result of training cannot be read: {error}", ExitCode.IMPOSSIBLE) from error


def nothing() -> None:
    """Do nothing."""


class DryRunWorkers:
    """Workers with a number of threads; the next one may load torch before its task is known."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._loading: Worker | None = None

    def close(self) -> None:
        """Stop a worker that loads torch, or waits for a task."""
        if (worker := self._loading) is not None:
            self._loading = None
            worker.send(LeaveNow())
            worker.process.wait()

    def load(self) -> None:
        """Make a worker load torch for the next dry run, while this process does something else."""
        self._loading = self._loading or self._started()

    def _started(self) -> Worker:
        return start_worker(LOADED_WORKER, limit_bytes=_CACHE_LIMIT_BYTES, threads=self.threads)

    def dry_run(
        self,
        path: Path,
        page_dirs: Sequence[Path],
        *,
        throttle: Throttle | None = None,
        compared: int = 0,
        probe_packing: bool = False,
        steps: int = DRY_RUN_STEPS,
        meanwhile: Callable[[], None] = nothing,
    ) -> DryRun:
        """Run a few steps of a bundle, paging to a directory on each of its media, and return the figures.

        At least `compared` steps are compared with plain PyTorch's. `probe_packing`: also measure what packing
        tensors would take. `meanwhile`: work of this process before it listens. Raises DryRunError if the worker
        fails, or gives different numbers.
        """
        with _page_folders(page_dirs) as (folder, *further):
            options = TorchOptions(
                bundle=path,
                state_dir=folder,
                scratch_dirs=tuple(further),
                steps=max(steps, compared),
                verify=compared,
                probe_packing=probe_packing,
                discard=True,
                read_limit=None if throttle is None else throttle.read_bytes_per_s,
                write_limit=None if throttle is None else throttle.write_bytes_per_s,
            )
            return self._ran(options, meanwhile)

    def referee(self, path: Path, page_dirs: Sequence[Path], manifest: Manifest) -> None:
        """Repeat the script's lone run with the bundle, and write and read a result.

        Raises DryRunError if anything differs.
        """
        with _page_folders(page_dirs) as (folder, *further):
            compared, result = len(manifest.plain.results.losses), folder / "result.safetensors"
            options = TorchOptions(
                bundle=path,
                state_dir=folder,
                scratch_dirs=tuple(further),
                steps=compared or manifest.accumulate,
                verify=compared,
                referee=compared > 0,
                discard=True,
                out=result,
            )
            self._ran(options, nothing)
            check_readable(result, manifest)

    def _ran(self, options: TorchOptions, meanwhile: Callable[[], None]) -> DryRun:
        worker, self._loading = self._loading or self._started(), None
        worker.send(TakeWork(words=tuple(options.words())))
        meanwhile()
        report = _DryRunReport(self.threads)
        for event in worker.events():
            report.take(event)
        return report.dry_run(worker.process.returncode)


@dataclass(slots=True)
class _DryRunReport:
    """What a dry run's worker has reported so far."""

    threads: int
    start_bytes: int = 0
    peak_bytes: int = 0
    device_peak_bytes: int = 0
    pace: float = 1.0
    packings: dict[str, tuple[PackingCost, ...]] = field(default_factory=dict)
    failed: TrainingFailed | None = None

    def take(self, event: Event) -> None:
        match event:
            case WorkerReady():
                self.start_bytes = event.start_peak_bytes or 0
            case StepDone():
                self.peak_bytes = max(self.peak_bytes, event.peak_rss_bytes or 0)
                self.device_peak_bytes = max(self.device_peak_bytes, event.device_peak_bytes or 0)
                self.pace = _pace(event, self.threads)
            case PackingProbed():
                self.packings[event.graph] = (*self.packings.get(event.graph, ()), *event.costs)
            case TrainingFinished():
                self.peak_bytes = max(self.peak_bytes, event.peak_rss_bytes or 0) + event.untouched_block_bytes
            case TrainingFailed():
                self.failed = event

    def dry_run(self, ended: int) -> DryRun:
        """Return the figures of the run that `ended` with this exit code.

        Raises DryRunError if it failed for any reason except a full device.
        """
        if self.failed is not None and self.failed.code == torch.OutOfMemoryError.__name__:
            return DryRun(self.peak_bytes, self.start_bytes, device_full=True)
        if ended:
            message = "" if self.failed is None else self.failed.message
            raise DryRunError(message or f"the dry run ended with exit code {ended}", ended)
        return DryRun(self.peak_bytes, self.start_bytes, self.pace, self.packings, self.device_peak_bytes)


def _pace(step: StepDone, threads: int) -> float:
    """Return the ratio of a step's measured to its planned compute seconds.

    A single thread computes no longer than the CPU time of the process, which other processes disturb less than the
    clock.
    """
    planned = step.planned_compute_s or 0.0
    taken = step.wall_s - step.phases_s["stall"]
    if threads == 1:
        taken = min(taken, step.cpu_s)
    return taken / planned if planned > 0 else 1.0


@functools.cache
def loading_peak() -> int:
    """Return a worker's peak while it loads Python and torch, in bytes.

    Raises DryRunError if torch cannot be loaded.
    """
    environment = {**module_environment(), **preload_environment(None)}
    try:
        return int(run_helper(HelperCommand("port_agent.system.torch_loading", (), environment, directory=None)))
    except HelperError as error:
        raise DryRunError(f"torch could not be loaded in a process of its own: {error.last_line}") from error
