"""Plan and run a benchmark model with this project, for the tables that compare it."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import make_optimizer, workload
from port_agent.energy.sources.power_models import power_with
from port_agent.prepare.making import bundle_maker, device_costs
from port_agent.prepare.making.bundle_file import BundleFile
from port_agent.prepare.making.packed_pages import with_packed_pages
from port_agent.prepare.measurement.dry_run import Throttle
from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
from port_agent.prepare.pools import Pools
from port_agent.prepare.tiling.choice import again_with_base, choose_tiling
from port_agent.prepare.tiling.split_gradients import with_split_gradients
from port_agent.prepare.tiling.tiled_job import ComparisonLimits, CutTarget, TiledJob
from port_agent.worker.protocol import plain_values
from port_agent.worker.start import start_worker, torch_worker
from port_agent.worker.worker_options import TorchOptions
from port_planner import make_bundle
from port_planner.ir.bundle.bundle import read_manifest
from port_planner.ir.bundle.manifest import NO_LIMITS
from port_planner.ir.costs import DeviceCosts
from port_planner.job import TrainingJob

BESIDE_RESIDENT = -24 << 20
"""What RLIMIT_DATA counts beyond resident memory: stacks and data that nothing has touched (7 MiB and more), less
code, which it does not count (38 MiB in a GPT-2, 62 in a ResNet-50). A plan that is to run under such a limit is made
for that many bytes less.
"""
BESIDE_RESIDENT_LEAST = -40 << 20
"""The same for models with much code: it is tried first in a search for the smallest limit."""
BESIDE_RESIDENT_PER_THREAD = 16 << 20
"""The same for each thread after the first: its stack of 8 MiB, and what its allocator keeps ready."""


COMPARING_BYTES = 8 << 30
"""More than a comparison of operators in tiles takes, whatever the benchmark's budget."""


@dataclass
class Run:
    """Events of a finished run."""

    steps: list[dict[str, Any]]
    planned_peak_bytes: int
    peak_bytes: int
    digest: str = ""
    events: list[dict[str, Any]] = field(default_factory=list, repr=False)


class Ours:
    """One model, captured and profiled once, and planned for several budgets."""

    def __init__(
        self,
        model: str,
        folder: Path,
        optimizer: str,
        batch_size: int | None,
        *,
        steps: int,
        small: bool = False,
        size: int | None = None,
        threads: int = 1,
        data: Sequence[torch.Tensor] | None = None,
        change: Callable[[TrainingJob], None] = lambda job: None,
    ) -> None:
        torch.set_num_threads(threads)
        work = workload(model, batch_size=batch_size, small=small, size=size)
        batches = [work.batch(i) for i in range(steps)]
        columns = [torch.cat(columns) for columns in zip(*batches, strict=True)] if data is None else list(data)
        self.job = TrainingJob(
            work.model,
            work.loss_fn,
            make_optimizer(optimizer, work.model.parameters()),
            columns,
            batches[0][0].shape[0],
            name=model,
        )
        self.folder, self.steps, self.threads = folder, steps, threads
        change(self.job)
        whole = make_bundle.prepare(self.job)
        power = power_with(threads)
        measured = MeasurementWorker().measure(whole.graphs.values(), threads, power.compute_watts, lambda *_: None)
        self.room = ComparisonLimits(COMPARING_BYTES, folder, threads)
        self.whole = TiledJob(whole, measured, ())
        sliced = with_split_gradients(whole, measured, self.room, power.compute_watts, lambda *_: None)
        self.halved, self.captured, self.measured = sliced, sliced.captured, sliced.measured
        self.device = device_costs.this_device(sliced.measured, folder, threads, power, lambda *_: None)

    def plan(
        self,
        ram_bytes: int,
        *,
        strategy: str = "greedy",
        time_limit_s: float = 20.0,
        limits: tuple[float, float] | None = None,
    ) -> Path | None:
        """Return a bundle planned for a budget (with flash no faster than `limits`, read and
        write); None if none fits.
        """
        path = self.folder / f"{self.job.name}-{ram_bytes}.port"
        device = device_costs.slower_flash(self.device, *limits) if limits else self.device
        device = with_packed_pages(device, self.captured.initial_tensors)
        planner = make_bundle.default_planner(strategy=strategy, time_limit_s=time_limit_s)

        def make(device: DeviceCosts, last: bool) -> None:
            sliced = choose_tiling(
                self.whole, self.halved, CutTarget(device, ram_bytes, self.room, lambda *_: None), planner, NO_LIMITS
            )
            options = bundle_maker.MakeOptions(Pools(ram_bytes), (self.folder,), planner, throttle=throttle(limits))
            draft = BundleFile.beside(path, sliced.captured, self.threads)
            bundle_maker.make(path, draft, sliced.measured, device, options, lambda *_: None)

        try:
            again_with_base(make, device)
        except make_bundle.InfeasibleError:
            return None
        return path

    def train(
        self,
        path: Path,
        *,
        data_limit_bytes: int | None = None,
        limits: tuple[float, float] | None = None,
        enter: Callable[[int], None] | None = None,
    ) -> Run | None:
        """Train the bundle in a separate worker, whose process id `enter` gets at once; None if it does not finish."""
        with tempfile.TemporaryDirectory(dir=self.folder) as state:
            slow = throttle(limits)
            command = torch_worker(
                TorchOptions(
                    bundle=path,
                    state_dir=Path(state),
                    steps=self.steps,
                    checkpoint_every=self.steps,
                    digest=True,
                    read_limit=None if slow is None else slow.read_bytes_per_s,
                    write_limit=None if slow is None else slow.write_bytes_per_s,
                )
            )
            budget = read_manifest(path).plans[0].ram_bytes
            worker = start_worker(command, limit_bytes=budget, threads=self.threads, data_limit_bytes=data_limit_bytes)
            if enter is not None:
                enter(worker.process.pid)
            events = [plain_values(event) for event in worker.events()]
        steps = [e for e in events if e["event"] == "step"]
        if worker.process.returncode or len(steps) < self.steps:
            return None
        peak = max(e["peak_rss_bytes"] for e in steps)
        return Run(steps, events[0]["planned_peak_bytes"], peak, events[-1]["digest"], events)


def throttle(limits: tuple[float, float] | None) -> Throttle | None:
    """Return the options that limit a worker to flash of this speed."""
    return None if limits is None else Throttle(int(limits[0]), int(limits[1]))
