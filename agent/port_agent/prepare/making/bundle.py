"""Make a bundle on this machine: plan, try it out, plan again with what that taught, write.

Behind `port-agent plan`.
"""

from dataclasses import dataclass
from pathlib import Path

from port_agent.prepare.making.attempts import Attempts
from port_agent.prepare.making.draft import BundleDraft
from port_agent.prepare.making.smaller_plans import SmallerPlans, smaller_plans, with_cheapest_first, with_smaller_plans
from port_agent.prepare.making.trial import Throttle, TrialWorkers
from port_agent.prepare.making.unplanned import held_bytes, too_much
from port_agent.prepare.pools import Pools
from port_agent.prepare.progress import Progress
from port_planner.ir.bundle.manifest import Manifest
from port_planner.ir.bundle.writer import publish_bundle
from port_planner.ir.costs import DeviceCosts
from port_planner.make_bundle import InfeasibleError, Planner
from port_planner.profiling.operators import Measured

_TRIES = 4
"""Of the chosen planner: each corrects what the one before it took beside its plan."""


@dataclass(frozen=True)
class Made:
    """A finished bundle: its manifest, and what the trial run measured: of the host's memory, and of the device's own."""

    manifest: Manifest
    measured_peak_bytes: int
    measured_device_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """What the first plan is made for and how. `page_dirs`: of the device's media, in their order.

    `wide`: more smaller plans, by the chosen planner instead of the quick one, none dominated by another.
    """

    pools: Pools
    page_dirs: tuple[Path, ...]
    planner: Planner
    wide: bool = False
    throttle: Throttle | None = None


def make(
    path: Path,
    draft: BundleDraft,
    measured: Measured,
    device: DeviceCosts,
    options: MakeOptions,
    progress: Progress,
    workers: TrialWorkers | None = None,
) -> Made:
    """Plan, try the plan for two steps, reserve what turned out unplanned, and write the bundle.

    The bundle's first plan is for the host's memory, and for the device's where that has its own; smaller ones follow, to which the
    agent switches when memory gets short; they write no more than the draft's limits and keep to their deadline where they can.
    `workers`: of which one may be loading torch already.
    Raises InfeasibleError where nothing fits; nothing is left behind then, and a bundle that was there stays. Weights and
    data are written once, into the `draft` beside `path`: every further try only replaces the plans behind them.
    """
    workers = workers or TrialWorkers(draft.threads)
    attempts = Attempts(draft, measured, device, options.pools, options.page_dirs, options.throttle, workers)
    try:
        made = _settled(attempts, options.planner, progress, wide=options.wide)
        publish_bundle(draft.path, path)
    except InfeasibleError as error:
        if draft.begun and attempts.device.base_bytes < attempts.pools.computing_bytes:
            error.base_bytes = attempts.device.base_bytes
        raise
    finally:
        workers.close()
        draft.path.unlink(missing_ok=True)
    return made


def _settled(attempts: Attempts, planner: Planner, progress: Progress, *, wide: bool) -> Made:
    """Try plans until one takes what it says, then add smaller ones. Raises InfeasibleError, TrialError."""
    pools, smaller = attempts.pools, list[SmallerPlans]()

    def plan_smaller() -> None:
        smaller[:] = smaller_plans(attempts, planner if wide else None)

    progress("try", 0.0)
    found = attempts.find_unplanned()
    for attempt in range(_TRIES):
        progress("plan", attempt / _TRIES)
        found, settled = attempts.tried(planner, meanwhile=plan_smaller)
        if settled:
            found = with_cheapest_first(attempts, smaller, found)
            manifest = with_smaller_plans(attempts, smaller)
            return Made(
                manifest, held_bytes(pools, found), 0 if pools.device_bytes is None else found.device_peak_bytes
            )
    raise too_much(pools, found)
