"""Make a bundle on this machine: plan, try the plan, plan again with the measurements, and write the bundle.

`port-agent plan` calls this.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from port_agent.prepare.making.bundle_file import BundleFile
from port_agent.prepare.making.refinement import Refinement
from port_agent.prepare.making.smaller_plans import SmallerPlans, smaller_plans, with_cheapest_first, with_smaller_plans
from port_agent.prepare.making.tried_floor import try_floor
from port_agent.prepare.making.unplanned import held_bytes
from port_agent.prepare.measurement.dry_run import DryRun, DryRunError, DryRunWorkers, Throttle, nothing
from port_agent.prepare.measurement.progress import Progress
from port_agent.prepare.pools import Pools
from port_planner.base.errors import ExitCode
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import Manifest, PlainRun
from port_planner.ir.bundle.writer import publish_bundle
from port_planner.ir.costs import DeviceCosts
from port_planner.make_bundle import InfeasibleError, PlanFunction
from port_planner.profiling.operator_profile import MeasuredCosts


@dataclass(frozen=True)
class BundleReport:
    """A finished bundle: its manifest, and the dry run's peaks of the host's memory and of the device's own."""

    manifest: Manifest
    measured_peak_bytes: int
    measured_device_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """The purpose of the first plan, and how it is made. `page_dirs`: directories on the
    device's media, in their order.

    `wide`: make more plans for smaller budgets, with the chosen planner instead of the quick one;
    none is dominated by another.
    """

    pools: Pools
    page_dirs: tuple[Path, ...]
    planner: PlanFunction
    wide: bool = False
    throttle: Throttle | None = None
    run_alone: Callable[[], PlainRun] = PlainRun
    """Function that runs the script alone, after the plans are made."""
    is_last: bool = True
    """Whether an error is final even if the worker held more than was known when tilings were chosen.

    If so, a sufficient budget is searched for.
    """
    unpublished: bool = False
    """Whether only to find out that a plan keeps within the budget: no bundle is left, and the
    script does not run alone.
    """


def make(
    path: Path,
    bundle_file: BundleFile,
    measured: MeasuredCosts,
    device: DeviceCosts,
    options: MakeOptions,
    progress: Progress,
    workers: DryRunWorkers | None = None,
) -> BundleReport:
    """Plan, run the plan for two steps, reserve the memory that proved unplanned, and write the bundle.

    The bundle's first plan is for the host's memory, and for the device's if it has its own. Smaller plans follow, to
    which the agent switches when memory gets short. They respect the draft's limit of writes, and its deadline if they
    can. `workers`: one of them may already be loading torch. Raises InfeasibleError if nothing fits; then nothing is
    left behind, and an existing bundle stays. Weights and data are written once, into the `bundle_file` next to `path`;
    each further try replaces only the plans after them.
    """
    workers = workers or DryRunWorkers(bundle_file.threads)
    refinement = Refinement(bundle_file, measured, device, options.pools, options.page_dirs, options.throttle, workers)
    try:
        made = _refined(refinement, options, progress)
        if not options.unpublished:
            publish_bundle(bundle_file.path, path)
    finally:
        workers.close()
        bundle_file.path.unlink(missing_ok=True)
    return made


def _refined(refinement: Refinement, options: MakeOptions, progress: Progress) -> BundleReport:
    """Try plans until one takes the predicted memory, add smaller ones, and run the referee.

    Raises InfeasibleError, DryRunError.
    """
    pools, smaller = refinement.pools, list[SmallerPlans]()

    def plan_smaller() -> None:
        smaller[:] = smaller_plans(refinement, options.planner if options.wide else None)

    progress("try", 0.0)
    found = _kept(refinement, options, partial(progress, "plan"), nothing if options.unpublished else plan_smaller)
    if options.unpublished:
        return BundleReport(Bundle(refinement.bundle_file.path).manifest, held_bytes(pools, found))
    found = with_cheapest_first(refinement, smaller, found)
    progress("referee", 0.0)
    manifest = _refereed(refinement, smaller, options)
    return BundleReport(
        manifest, held_bytes(pools, found), 0 if pools.device_bytes is None else found.device_peak_bytes
    )


def _kept(
    refinement: Refinement, options: MakeOptions, planning: Callable[[float], None], meanwhile: Callable[[], None]
) -> DryRun:
    """Return a dry run of a plan within the budget, which the draft has then; what is tried for an
    error's figure may be one.

    Raises InfeasibleError.
    """
    device = refinement.device
    try:
        return refinement.kept(options.planner, planning, meanwhile)
    except InfeasibleError as error:
        if refinement.bundle_file.begun and refinement.device.base_bytes < refinement.pools.computing_bytes:
            error.base_bytes = refinement.device.base_bytes
        is_last = options.is_last or not error.found_more_than(device)
        found = try_floor(refinement, error, meanwhile) if is_last else None
        if found is None:
            raise
        return found


def _refereed(refinement: Refinement, smaller: list[SmallerPlans], options: MakeOptions) -> Manifest:
    """Run the script alone, add its results and all plans to the draft, and run the bundle beside it.

    Raises DryRunError, CaptureError.
    """
    draft = refinement.bundle_file
    refinement.workers.load()
    plain = options.run_alone()
    draft.captured = replace(draft.captured, plain=plain)
    manifest = with_smaller_plans(refinement, smaller)
    others = ", ".join(draft.captured.other_formulas)
    expected = draft.captured.reference
    if draft.captured.known is not None and plain.unchecked:
        raise DryRunError(
            "the program counts or keeps tensors over steps, and its numbers could not be compared "
            f"({plain.unchecked}); train with `port-agent exec`, which supports this",
            ExitCode.IMPOSSIBLE,
        )
    if others and plain.unchecked and expected.losses and not expected.placed:
        raise DryRunError(f"{_by_other_formulas(others)} ({plain.unchecked})", ExitCode.IMPOSSIBLE)
    try:
        refinement.workers.referee(draft.path, options.page_dirs, manifest)
    except DryRunError as error:
        if others:
            raise DryRunError(f"{error}. {_by_other_formulas(others)}", error.exit_code) from error
        raise
    return manifest


def _by_other_formulas(operators: str) -> str:
    return (
        f"The gradients of {operators} have another formula, and other last digits, while a step is recorded, and "
        "nothing shows that they do not matter here; compute that with other operators, such as single products, or "
        "train with `port-agent exec`"
    )
