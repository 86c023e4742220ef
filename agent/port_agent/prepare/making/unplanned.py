"""Unplanned memory: what a dry run took besides its plan is reserved in the next plan."""

from dataclasses import replace

from port_agent.prepare.measurement.dry_run import DryRun
from port_agent.prepare.pools import Pools, with_host_headroom
from port_planner.base.units import format_bytes
from port_planner.ir.bundle.manifest import PlanChoice
from port_planner.ir.costs import DeviceCosts
from port_planner.make_bundle import InfeasibleError

HEADROOM_SHARE = 0.01
"""Share of the budget that is left free for differences from run to run."""
UNKNOWN = 1 / 12
"""The same share in the first dry run, which finds what a worker holds besides its plan: 30
MiB for a small transformer.
"""
_FRAGMENTS = 1 / 16
"""Share of the device's budget that is additionally reserved each time a dry run finds that planned
memory is not available there.
"""
_TOLERANCE = 0.03
"""Accepted difference between the measured and the planned peak, as a share."""
_MORE = 1.05
"""Suggested budget as a multiple of a step's memory, if no try kept within the budget."""


def target_bytes(pools: Pools, spared: float = HEADROOM_SHARE) -> int:
    """Return the planning target: the budget of the memory in which operators compute, without the headroom."""
    return int(pools.computing_bytes * (1 - spared))


def held_bytes(pools: Pools, found: DryRun) -> int:
    """Return what a dry run took of the host's memory, including the device's if both are one."""
    return found.peak_bytes + (found.device_peak_bytes if pools.device_bytes is None else 0)


def with_unplanned(device: DeviceCosts, pools: Pools, planned: PlanChoice, found: DryRun) -> DeviceCosts | None:
    """Return the device with the unplanned memory reserved; None if each pool took what was planned."""
    if found.device_full:  # within its budget by the plan, which ignores gaps between tensors
        return replace(device, base_bytes=device.base_bytes + int(_FRAGMENTS * pools.computing_bytes))
    held = held_bytes(pools, found)
    more, fits = held - planned.peak_bytes, _near(held, planned.peak_bytes, pools.ram_bytes)
    if pools.device_bytes is None:
        return None if fits else _with_more_base(device, more)
    if not fits:
        beside = replace(device, host_base_bytes=max(0, device.host_base_bytes + more))
        device = with_host_headroom(beside, pools.ram_bytes)
    if _near(found.device_peak_bytes, planned.device_peak_bytes, pools.device_bytes):
        return None if fits else device
    return _with_more_base(device, found.device_peak_bytes - planned.device_peak_bytes)


def _with_more_base(device: DeviceCosts, more_bytes: int) -> DeviceCosts:
    return replace(device, base_bytes=max(0, device.base_bytes + more_bytes))


def _near(taken: int, planned: int, budget: int) -> bool:
    return taken <= budget and abs(taken - planned) <= _TOLERANCE * planned


def too_much(pools: Pools, found: DryRun) -> InfeasibleError:
    """Return the error for a step that stayed within its budgets in no try."""
    held, budget, option = held_bytes(pools, found), pools.ram_bytes, "--ram"
    if pools.device_bytes is not None and held <= pools.ram_bytes:
        held, budget, option = found.device_peak_bytes, pools.device_bytes, "--gpu-ram"
    advised = int(max(held, budget) * _MORE)
    return InfeasibleError(
        f"the step's memory could not be kept within {format_bytes(budget)}: the last dry run took {format_bytes(held)}",
        advised,
        option=option,
    )


def too_little_to_start(reason: str, start_bytes: int) -> InfeasibleError:
    """Return the error for a budget below the peak before the first step."""
    return InfeasibleError(
        f"{reason}; before the first step, loading Python and torch takes {format_bytes(start_bytes)}",
        int(start_bytes * (1 + HEADROOM_SHARE)),
    )
