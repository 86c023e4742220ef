"""The budget that an error suggests, which a dry run has kept, so that the next run with it succeeds."""

from collections.abc import Callable

from port_agent.prepare.making.refinement import Refinement, quick_planner
from port_agent.prepare.making.unplanned import HEADROOM_SHARE
from port_agent.prepare.measurement.dry_run import DryRun, DryRunError, nothing
from port_agent.prepare.pools import Pools
from port_planner.base.errors import PortError
from port_planner.make_bundle import InfeasibleError, PlanFunction

_TRIES = 4
"""Largest number of tries of budgets: the first measures the worker's memory, which the next one includes."""
_CONFIRMATIONS = 3
"""Largest number of budgets for which everything is chosen again."""
_MORE = 1.02
"""Least increase, as a factor, of a budget that was not enough."""


def try_floor(
    refinement: Refinement, refusal: InfeasibleError, meanwhile: Callable[[], None] = nothing
) -> DryRun | None:
    """Put into an error a budget that a dry run kept, with a margin for differences from run to run, or
    else one that seems enough.

    What a worker holds besides the step differs from plan to plan, so the largest that the tries found counts. With
    what it holds beside the tried plan, the refinement's own budget may be enough after all: then return a dry run
    within it, whose plan the draft has; `meanwhile`: what this process does during that run. Otherwise the draft's
    plans are no longer those of that budget. If the device has its own memory, nothing is tried.
    """
    if refusal.needed_bytes is None or refinement.pools.device_bytes is not None:
        return None
    own = refinement.pools
    planner, needed_bytes = quick_planner(refinement.bundle_file.limits), refusal.needed_bytes
    largest_base_bytes = refinement.device.base_bytes
    for _ in range(_TRIES):
        budget_bytes = _with_headroom(max(needed_bytes, refinement.start_bytes))
        refinement.pools, refinement.refined = Pools(budget_bytes), None
        try:
            refinement.kept(planner)
        except InfeasibleError as error:
            needed_bytes = max(error.needed_bytes or 0, int(_MORE * budget_bytes))
        except DryRunError:
            break
        else:
            needed_bytes, refusal.is_tried = budget_bytes, True
            break
        finally:
            largest_base_bytes = max(largest_base_bytes, refinement.device.base_bytes)
    refusal.held_bytes = largest_base_bytes
    refusal.needed_bytes = _with_headroom(needed_bytes)
    return _within(refinement, own, planner, meanwhile) if refusal.is_tried else None


def _within(
    refinement: Refinement, pools: Pools, planner: PlanFunction, meanwhile: Callable[[], None]
) -> DryRun | None:
    """Plan for other budgets with what is known now, and return a dry run that stays within them; None if none does."""
    refinement.pools, refinement.refined = pools, None
    try:
        found, is_final = refinement.tried(planner, meanwhile=meanwhile)
    except (DryRunError, InfeasibleError):
        return None
    return found if is_final else None


def confirm_floor(refusal: InfeasibleError, accept: Callable[[int, int], None]) -> None:
    """Raise the budget that an error suggests until the computation of the next run accepts it.

    That run chooses tilings, and the order of micro-batches, for its own budget. So do the calls of `accept`, with a
    budget and what a worker holds besides the step, in bytes. They raise InfeasibleError, whose figures the next call
    gets. Nothing is done for an error that suggests no budget of the host's memory.
    """
    if refusal.needed_bytes is None or refusal.held_bytes is None:
        return
    refusal.is_tried = False
    for _ in range(_CONFIRMATIONS):
        budget_bytes = int(refusal.needed_bytes * (1 - HEADROOM_SHARE))
        try:
            accept(budget_bytes, refusal.held_bytes)
        except InfeasibleError as error:
            refusal.needed_bytes = max(error.needed_bytes or 0, int(_MORE * refusal.needed_bytes))
            refusal.held_bytes = max(error.held_bytes or 0, refusal.held_bytes)
        except PortError:
            return
        else:
            refusal.is_tried = True
            return


def _with_headroom(nbytes: int) -> int:
    return int(nbytes / (1 - HEADROOM_SHARE)) + 1
