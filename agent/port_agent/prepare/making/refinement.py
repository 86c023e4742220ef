"""Refine plans by dry runs: knowledge of memory and costs improves with each one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from port_agent.prepare.making.bundle_file import BundleFile
from port_agent.prepare.making.dry_run_costs import at_dry_run_pace, with_packings
from port_agent.prepare.making.unplanned import (
    HEADROOM_SHARE,
    UNKNOWN,
    target_bytes,
    too_little_to_start,
    too_much,
    with_unplanned,
)
from port_agent.prepare.measurement.dry_run import DRY_RUN_STEPS, DryRun, DryRunWorkers, Throttle, loading_peak, nothing
from port_agent.prepare.pools import Pools
from port_planner import make_bundle
from port_planner.base.units import format_bytes
from port_planner.ir.bundle.manifest import NO_LIMITS, Manifest, PlannedLimits
from port_planner.ir.costs import CostTable, DeviceCosts
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import host_bytes_of
from port_planner.make_bundle import InfeasibleError, PlanFunction
from port_planner.profiling.operator_profile import MeasuredCosts

_TRIES = 4
"""Largest number of tries with one planner; each corrects for what the previous one took besides its plan."""
_QUICK_S = 1.0
"""Seconds for searching plans that are many, or that are only dry-run to see what a worker holds besides them."""
_SLOW_STEP_S = 15.0
"""Seconds of a step above which the first dry run has only one step.

On an SD card, a step of GPT-2 moves 4 GB; the last dry run shows the rest.
"""

_Runs = dict[str, tuple[tuple[int, ...], tuple[Decision, ...]]]
"""Order of a plan's operators, and its recomputations, for each graph."""


def quick_planner(limits: PlannedLimits) -> PlanFunction:
    """Return the planner for intermediate plans, and for those besides the first one."""
    return make_bundle.default_planner(strategy="greedy", time_limit_s=_QUICK_S, limits=limits)


@dataclass(frozen=True, slots=True)
class _RefinedPlans:
    """Plans that took the planned memory in a dry run."""

    plans: _Runs
    dry_run: DryRun


@dataclass(slots=True)
class Refinement:
    """Tries of plans for a bundle, with the knowledge of the `device` and of operators' costs after the last one."""

    bundle_file: BundleFile
    measured: MeasuredCosts
    device: DeviceCosts
    pools: Pools
    page_dirs: tuple[Path, ...]
    throttle: Throttle | None
    workers: DryRunWorkers
    start_bytes: int = 0
    """The peak before the first step; 0 until a dry run, or a budget that is too small for one, measures it."""
    refined: _RefinedPlans | None = None
    """Plans that already ran as planned, and need no further dry run."""

    def find_unplanned(self) -> DryRun:
        """Run a quick plan to see what a worker holds besides it, the cost of packing, and the pace.

        The chosen planner then decides.
        """
        quick = quick_planner(NO_LIMITS)
        try:
            found, _ = self.tried(quick, spared=UNKNOWN, probe_packing=True)
        except InfeasibleError:
            found, _ = self.tried(quick, probe_packing=True)
        estimated, graphs = self.bundle_file.estimated, self.bundle_file.captured.graphs
        self.measured = with_packings(self.measured, graphs, found, self.device.compute_watts, estimated=estimated)
        if not estimated:
            self.measured = at_dry_run_pace(self.measured, found)
        return found

    def kept(
        self,
        planner: PlanFunction,
        planning: Callable[[float], None] = lambda share: None,
        meanwhile: Callable[[], None] = nothing,
    ) -> DryRun:
        """Try plans until one takes almost the predicted memory, and return its dry run; `planning` is called with the
        share of tries that are done.

        Raises InfeasibleError if none does.
        """
        found = self.find_unplanned()
        for tries in range(_TRIES):
            planning(tries / _TRIES)
            found, final = self.tried(planner, meanwhile=meanwhile)
            if final:
                return found
        raise too_much(self.pools, found)

    def tried(
        self,
        planner: PlanFunction,
        *,
        spared: float = HEADROOM_SHARE,
        probe_packing: bool = False,
        meanwhile: Callable[[], None] = nothing,
    ) -> tuple[DryRun, bool]:
        """Plan, write and run; record the memory that proved unplanned. Return whether the gain was negligible.

        `meanwhile`: what this process does itself while the plans run in another, which loads torch during the search.
        """
        if self.refined is None:
            self.workers.load()
        plans, costs = self._planned(planner, target_bytes(self.pools, spared))
        return self.run(plans, costs, probe_packing=probe_packing, meanwhile=meanwhile)

    def planned(self, ram_bytes: int, planner: PlanFunction) -> tuple[dict[str, Plan], dict[str, CostTable]]:
        """Return plans for a budget, and the costs with which they were made. Raises InfeasibleError."""
        bundle_file = self.bundle_file
        return make_bundle.plan_all(
            bundle_file.captured, self.measured, self.device, ram_bytes, planner, bundle_file.limits
        )

    def _planned(self, planner: PlanFunction, ram_bytes: int) -> tuple[dict[str, Plan], dict[str, CostTable]]:
        """Return plans as `planned` does, within the host's memory if that is separate; the error says
        what a worker needs to start.
        """
        try:
            found = self.planned(ram_bytes, planner)
            self._check_host(*found)
            return found
        except InfeasibleError as error:
            if self.pools.device_bytes is not None:
                raise
            self.start_bytes = self.start_bytes or loading_peak()
            if error.needed_bytes is None or error.needed_bytes >= self.start_bytes:
                raise
            raise too_little_to_start(error.args[0], self.start_bytes) from error

    def _check_host(self, plans: Mapping[str, Plan], costs: Mapping[str, CostTable]) -> None:
        """Raise InfeasibleError if operators on the CPU alongside a device, and pages, exceed the host's memory."""
        captured = self.bundle_file.captured
        if self.pools.device_bytes is None or not captured.placed:
            return
        programs = [lower(captured.graphs[name], costs[name], plan) for name, plan in plans.items()]
        needed = self.device.host_base_bytes + host_bytes_of(programs)
        if needed > self.pools.ram_bytes:
            raise InfeasibleError(
                f"operators that run on the CPU, and pages of the device, take {format_bytes(needed)} of the host's "
                f"memory, but the budget is {format_bytes(self.pools.ram_bytes)}",
                needed,
                remedy="raise --gpu-ram so that fewer pages leave the device, or plan without --place",
            )

    def run(
        self,
        plans: Mapping[str, Plan],
        costs: Mapping[str, CostTable],
        *,
        probe_packing: bool = False,
        meanwhile: Callable[[], None] = nothing,
    ) -> tuple[DryRun, bool]:
        """Put these plans first in the draft and run them; record the memory that proved unplanned.

        Return whether the gain was negligible.
        """
        manifest = self.bundle_file.put([plans], costs, [self.pools.computing_bytes])
        runs = _what_runs(plans)
        if self.refined is not None and self.refined.plans == runs:
            meanwhile()
            return self.refined.dry_run, True
        compared = len(manifest.reference.losses)
        whole = max(DRY_RUN_STEPS, compared)
        steps = self._first_steps(manifest, whole, moving=runs is None) if probe_packing else whole
        if probe_packing and runs is None:  # what pages move in is tried again, and compared then
            compared = 0
        found = self.workers.dry_run(
            self.bundle_file.path,
            self.page_dirs,
            throttle=self.throttle,
            compared=min(steps, compared),
            probe_packing=probe_packing,
            steps=steps,
            meanwhile=meanwhile,
        )
        self.start_bytes = max(self.start_bytes, found.start_bytes)
        if self.start_bytes > self.pools.ram_bytes:
            raise too_little_to_start(f"the budget is {format_bytes(self.pools.ram_bytes)}", self.start_bytes)
        corrected = with_unplanned(self.device, self.pools, manifest.plans[0], found)
        if corrected is not None:
            self.device = corrected
        elif runs is not None and steps == whole:
            self.refined = _RefinedPlans(runs, found)
        return found, corrected is None

    def _first_steps(self, manifest: Manifest, whole: int, *, moving: bool) -> int:
        """Return how many of the `whole` dry run's steps the first one runs.

        `moving`: whether pages move, in which case a later dry run follows anyway.
        """
        captured = self.bundle_file.captured
        if manifest.plans[0].seconds > _SLOW_STEP_S:
            return 1
        if captured.buckets and moving:  # the last dry run shows the other shapes
            return min(whole, max(DRY_RUN_STEPS, captured.job.accumulate + 1))
        return whole


def _what_runs(plans: Mapping[str, Plan]) -> _Runs | None:
    """Return what plans do, without their figures; None if costs also determine when transfers begin."""
    moving = any(
        plan.sliced or any(d.action not in (Action.RECOMPUTE, Action.INTERMEDIATE) for d in plan.decisions)
        for plan in plans.values()
    )
    return None if moving else {name: (plan.order, plan.decisions) for name, plan in plans.items()}
