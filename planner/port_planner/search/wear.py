"""Limits on what sparing flash may cost, and how wear is priced for a search."""

from dataclasses import replace

from port_planner.ir.costs import DeviceCosts

WEAR_WEIGHT = 10.0
"""Steps' energy that writing out all storages costs in the search. At the whole price of wear what else plans differ by is lost in
the solver's tolerances: of 1, 3, 10, 30, 100, the writes of the demo and of ResNet-18 were least at 10 to 30."""

SPARING_TIME = 1.25
"""How much longer a step may take to spare flash. By its price alone a written byte is worth hundreds of times the energy of
its transfer, and a step would take several times as long for the last few: who wants that sets a limit of bytes written."""


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

    The step takes `step_joules` with nothing moved, and has so many bytes of storages. The device has flash that wears out.
    """
    return min(1.0, WEAR_WEIGHT * step_joules / (costliest_wear(device) * storage_bytes))
