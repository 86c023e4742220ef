"""Limits on the cost of writing less to flash, and the price of wear in a search."""

from dataclasses import replace

from port_planner.ir.costs import DeviceCosts

WEAR_WEIGHT = 10.0
"""Energy of writing out all storages in the search, as a multiple of a step's energy.

At the full price of wear, all other differences between plans vanish in the solver's tolerances. Of 1, 3, 10, 30 and
100, the writes of the demo and of ResNet-18 were least at 10 to 30.
"""

SPARING_TIME = 1.25
"""Largest factor by which a step may take longer in order to write less to flash.

By its price alone, a written byte is worth hundreds of times the energy of its transfer, and avoiding the last few
would take several times as long. Users who want that set a limit on written bytes.
"""


def costliest_wear(device: DeviceCosts) -> float:
    """Return the joules of wear per written byte on the most expensive medium; 0 if none wears out."""
    return max(target.wear_joules_per_byte for target in device.targets)


def with_wear(device: DeviceCosts, share: float) -> DeviceCosts:
    """Return the device with this share of the wear cost of a written byte; 0 means no wear."""
    flash, *further = (
        replace(target, wear_joules_per_byte=share * target.wear_joules_per_byte) for target in device.targets
    )
    return replace(device, flash=flash, scratch_targets=tuple(further))


def visible_share(device: DeviceCosts, step_joules: float, storage_bytes: int) -> float:
    """Return the share of the wear price at which a search can still see differences in time and energy.

    The step takes `step_joules` without transfers, its storages have `storage_bytes`, and the device
    has flash that wears out.
    """
    return min(1.0, WEAR_WEIGHT * step_joules / (costliest_wear(device) * storage_bytes))
