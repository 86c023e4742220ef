"""Small jobs made into bundles whose operators' costs are those of a table."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_agent.prepare.making.bundle_file import BundleFile
from port_agent.prepare.making.bundle_maker import BundleReport, MakeOptions, make
from port_agent.prepare.measurement.dry_run import DryRun, DryRunWorkers
from port_agent.prepare.pools import Pools
from port_planner import make_bundle
from port_planner.ir.bundle.manifest import NO_LIMITS, PlannedLimits
from port_planner.ir.costs import Codec, DeviceCosts, Flash, OpCost, PackingCost
from port_planner.job import Bucket, TrainingJob
from port_planner.make_bundle import CapturedJob, PlanFunction
from port_planner.profiling.operator_profile import MeasuredCosts
from tests.planner.steps import costs_of

MIB = 1 << 20
HOST = Flash("host memory", 1e10, 1e10, 1e-6, 1e-11, 1e-11, capacity_bytes=0)
SEEN = PackingCost(3, 1, Codec.BITMAP, 4, 0.5, 1 << 17, 1e-3, 3e-3, 0.0)


def fake_trials(monkeypatch: pytest.MonkeyPatch, dry_run: Callable[..., DryRun]) -> None:
    """Have `dry_run` tell what plans take, in place of a worker, and no referee look."""

    def of(workers: DryRunWorkers, path: Path, page_dirs: Sequence[Path], **options: Any) -> DryRun:
        return dry_run(path, page_dirs, workers.threads, **options)

    monkeypatch.setattr(DryRunWorkers, "load", lambda _: None)
    monkeypatch.setattr(DryRunWorkers, "dry_run", of)
    monkeypatch.setattr(DryRunWorkers, "referee", lambda *_: None)


def classifier(
    model: nn.Module, data: list[torch.Tensor], batch_size: int, buckets: Sequence[Bucket] = ()
) -> TrainingJob:
    """Return a job that trains a model to tell ten classes apart."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingJob(
        model, lambda m, x, y: functional.cross_entropy(m(x), y), optimizer, data, batch_size, buckets=buckets
    )


def shallow() -> CapturedJob:
    """Return a job of two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return make_bundle.prepare(classifier(model, [torch.randn(16, 64), torch.randint(0, 10, (16,))], 8))


def deep() -> CapturedJob:
    """Return a job whose step has room for decisions."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())), nn.Linear(64, 10))
    return make_bundle.prepare(classifier(model, [torch.randn(2048, 64), torch.randint(0, 10, (2048,))], 1024))


def greedy(limits: PlannedLimits = NO_LIMITS) -> PlanFunction:
    """Return a planner that takes a second at the most."""
    return make_bundle.default_planner(strategy="greedy", time_limit_s=1.0, limits=limits)


def small_made(
    path: Path,
    captured: CapturedJob,
    ram_bytes: int,
    *,
    device: DeviceCosts | None = None,
    ops: tuple[OpCost, ...] | None = None,
    planner: PlanFunction | None = None,
    **asked: Any,
) -> BundleReport:
    """Make a bundle of a job on a device, with these costs of the main graph's operators, where others
    are given than the table's.
    """
    tables = [costs_of(graph) for graph in captured.graphs.values()]
    main, *further = (table.ops for table in tables)
    measured = MeasuredCosts((main if ops is None else ops, *further), 0, 0)
    of_options = {name: asked.pop(name) for name in ("wide", "throttle") if name in asked}
    pools = Pools(ram_bytes, asked.pop("device_bytes", None))
    page_dirs = (path.parent, *asked.pop("scratch_dirs", ()))
    options = MakeOptions(pools, page_dirs, planner or greedy(), **of_options)
    workers = asked.pop("workers", None)
    bundle_file = BundleFile.beside(path, captured, asked.pop("threads", 1), **asked)
    return make(path, bundle_file, measured, device or tables[0].device, options, lambda *_: None, workers)
