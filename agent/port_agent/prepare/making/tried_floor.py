"""The budget that a refusal names: one within which a trial kept, so that the next run with it is taken."""

from port_agent.prepare.making.refinement import Refinement, quick_planner
from port_agent.prepare.making.unplanned import HEADROOM_SHARE
from port_agent.prepare.measurement.dry_run import DryRunError
from port_agent.prepare.pools import Pools
from port_planner.make_bundle import InfeasibleError

_TRIES = 4
"""Of budgets: the first of them has the worker's memory measured, which the next one counts in."""
_MORE = 1.02
"""Of a budget that did not do, at least."""


def try_floor(refinement: Refinement, refusal: InfeasibleError) -> None:
    """Put into a refusal a budget within which a trial kept, with what differs from run to run beside it; else what seems to be enough.

    Where the device has memory of its own nothing is tried. The refinement's plans are no longer those of its own budget then.
    """
    if refusal.needed_bytes is None or refinement.pools.device_bytes is not None:
        return
    planner, needed_bytes = quick_planner(refinement.bundle_file.limits), refusal.needed_bytes
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
    refusal.needed_bytes = _with_headroom(needed_bytes)


def _with_headroom(nbytes: int) -> int:
    return int(nbytes / (1 - HEADROOM_SHARE)) + 1
