"""The file in which a bundle grows: weights and data are written once, and plans are rewritten after
them whenever they change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from port_planner import make_bundle
from port_planner.ir.bundle.manifest import NO_LIMITS, Manifest, PlannedLimits
from port_planner.ir.bundle.writer import replace_plans
from port_planner.ir.costs import CostTable
from port_planner.ir.plan import Plan
from port_planner.make_bundle import CapturedJob


@dataclass(slots=True)
class BundleFile:
    """A bundle of a captured job, at `path` once it is begun.

    `estimated`: its costs are those of another board. `make_free` is called once weights and data are written.
    """

    path: Path
    captured: CapturedJob
    threads: int
    estimated: bool = False
    limits: PlannedLimits = NO_LIMITS
    make_free: Callable[[], None] = lambda: None
    begun: bool = False

    @classmethod
    def beside(cls, bundle: Path, captured: CapturedJob, threads: int, **given: Any) -> Self:
        """Return the draft of a bundle, in a file next to it; `given`: further fields."""
        return cls(bundle.with_name(bundle.name + ".making"), captured, threads, **given)

    def put(
        self, plans: Sequence[Mapping[str, Plan]], costs: Mapping[str, CostTable], budgets: Sequence[int]
    ) -> Manifest:
        """Put these plans into the file and return its manifest; the first time, write the file."""
        first, self.begun = not self.begun, True
        described: Callable[..., Manifest] = partial(make_bundle.write, self.path) if first else make_bundle.describe
        manifest = described(
            self.captured, plans, costs, budgets, threads=self.threads, estimated=self.estimated, limits=self.limits
        )
        if first:
            self.make_free()
        else:
            replace_plans(self.path, manifest, plans, costs)
        return manifest
