"""The costs of a step on one device.

They are seconds, joules and workspace per operator, bandwidth of flash, watts at rest, and the cost of packing tensors.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from port_planner.base.bounds import Count, Figure, PositiveFigure, Text


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one operator: seconds of one run, bytes of workspace beyond operands and outputs.

    `workspace_bytes`: bytes of the memory for which plans are made. `beside_bytes`: bytes of the host's memory, if the
    operator runs there in a step that is planned for a device with its own.
    """

    seconds: Figure
    workspace_bytes: Count
    joules: Figure
    beside_bytes: Count = 0


class MediumKind(enum.Enum):
    """Kinds of media for pages and checkpoints, by the names that `show` prints."""

    SD = "SD card"
    EMMC = "eMMC"
    USB = "USB stick"
    SSD = "SSD"
    DISK = "disk that turns"
    ZRAM = "compressed RAM"


LINKS = ("page thread", "copying stream")
"""The queues that move pages, each in order: to and from files, and between a device's memory and the host's."""


@dataclass(frozen=True, slots=True)
class Flash:
    """A paging target: sustained bandwidth, latency per transfer and energy per byte, both ways.

    `endurance_bytes`: bytes that can be written before the medium wears out; None if unknown. `wear_joules_per_byte`:
    the energy whose price equals the wear of a written byte; no meter shows it.
    """

    name: Text
    read_bytes_per_s: PositiveFigure
    write_bytes_per_s: PositiveFigure
    latency_s: Figure
    read_joules_per_byte: Figure
    write_joules_per_byte: Figure
    endurance_bytes: PositiveFigure | None = None
    wear_joules_per_byte: Figure = 0.0
    capacity_bytes: Count | None = None
    """Largest number of bytes of pages at once, if the target is the host's memory for a device with its own.

    None for a medium.
    """
    packs_pages: bool = False
    """Whether floating-point pages are packed on it.

    Its figures are per byte of an unpacked page and include packing time and savings.
    """

    @property
    def link(self) -> int:
        """The one of `LINKS` on which its pages move."""
        return LINKS.index("page thread") if self.capacity_bytes is None else LINKS.index("copying stream")

    @property
    def written_cost_joules_per_byte(self) -> float:
        """Joules that a plan is charged for a written byte: its transfer and its wear."""
        return self.write_joules_per_byte + self.wear_joules_per_byte

    def read_seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.read_bytes_per_s

    def write_seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.write_bytes_per_s


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Costs that do not depend on the operator.

    `base_bytes` is the resident memory of a worker that has loaded torch and the program but no tensors, plus what was
    measured to stay unplanned (scratch of kernels, allocator slack). `static_watts` are drawn as long as the step
    lasts. `scratch_targets`: further media, for pages of storages that live within one step; weights and optimizer
    state page to `flash`. If operators compute in a device's own memory, `base_bytes` counts that memory. The host's
    memory is then the last of `scratch_targets`, for weights and optimizer state too. `host_base_bytes` is what the
    worker holds of it in addition to pages.
    """

    name: str
    base_bytes: int
    static_watts: float
    compute_watts: float
    flash: Flash
    threads: int = 1
    scratch_targets: tuple[Flash, ...] = ()
    host_base_bytes: int = 0
    shares_pages: bool = False
    """Whether pages move without a copy between files and memory that a device shares with the host, because that
    was measured to be faster.
    """

    @property
    def host(self) -> Flash | None:
        """The host's memory as a target; None if operators compute in it."""
        return next((target for target in self.scratch_targets if target.capacity_bytes is not None), None)

    @property
    def budget_option(self) -> str:
        """The option of `plan` that increases the memory in which operators compute."""
        return "--ram" if self.host is None else "--gpu-ram"

    @property
    def targets(self) -> tuple[Flash, ...]:
        """The paging targets, by the numbers that plans use; 0 is `flash`."""
        return (self.flash, *self.scratch_targets)


class Codec(enum.Enum):
    """How items are packed; the values are stored in bundles."""

    BITS = "bits"
    """Booleans of one byte: one bit each."""
    NARROW = "narrow"
    """64-bit integers: 1, 2, 4 or 8 bytes each above the smallest, after a header of 16 bytes."""
    BITMAP = "bitmap"
    """Items of 1, 2, 4 or 8 bytes: one bit each (in words of 64) and those that are not all zero bits."""
    PAIR = "pair"
    """32-bit floats that are +0 or one other value, as dropout's masks: that value, and one bit each."""
    SIGN = "sign"
    """32-bit floats of which only `not (value <= 0)` is still needed: one bit each. They cannot be restored."""
    INSIDE = "inside"
    """32-bit floats of which only `low < value < high` is still needed, none of them NaN: one bit each.

    They cannot be restored.
    """

    @property
    def comes_back(self) -> bool:
        """Return whether the items can be restored from their packed form."""
        return self not in (Codec.SIGN, Codec.INSIDE)


@dataclass(frozen=True, slots=True)
class PackingCost:
    """The cost of packing one storage after its `version`-th write, counted from 1.

    `density`: the largest observed share of items that are not all zero bits. `reserved_bytes`: the bytes that a plan
    reserves for the packed form: the largest observed size plus a margin. `pack_seconds` and `unpack_seconds` are those
    of one core, `joules` of both together.
    """

    storage: Count
    version: Count
    codec: Codec
    item_bytes: Annotated[int, msgspec.Meta(ge=1, le=8)]
    density: Annotated[float, msgspec.Meta(ge=0, le=1)]
    reserved_bytes: Count
    pack_seconds: Figure
    unpack_seconds: Figure
    joules: Figure

    @property
    def seconds(self) -> float:
        """Seconds of both directions together."""
        return self.pack_seconds + self.unpack_seconds


def by_version(costs: Iterable[PackingCost]) -> Mapping[tuple[int, int], PackingCost]:
    """Return the costs by storage and version."""
    return {(cost.storage, cost.version): cost for cost in costs}


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs of every op of a graph on its own device, in the order of its ops; `packings`: costs of packing the
    storages that may be packed.

    `elsewhere`: for a graph divided between two devices, the cost of each op on the other one; None for an op it lacks.
    """

    device: DeviceCosts
    ops: tuple[OpCost, ...]
    packings: tuple[PackingCost, ...] = ()
    elsewhere: tuple[OpCost | None, ...] = ()

    def reordered(self, order: Sequence[int]) -> "CostTable":
        """Return the costs of the same ops in another order."""
        elsewhere = tuple(self.elsewhere[i] for i in order) if self.elsewhere else ()
        return replace(self, ops=tuple(self.ops[i] for i in order), elsewhere=elsewhere)


_Factor = Annotated[float, msgspec.Meta(gt=0, lt=1e6)]
_Rate = Annotated[float, msgspec.Meta(gt=0, lt=1e15)]


class Speeds(msgspec.Struct, frozen=True, array_like=True):
    """Measured speeds of a job's steps: compute time relative to the bundle's costs, and paging rates in bytes per
    second.

    None: too few bytes moved in that direction to measure.
    """

    compute: _Factor = 1.0
    read_bytes_per_s: _Rate | None = None
    write_bytes_per_s: _Rate | None = None

    def differ_from(self, other: "Speeds", share: float) -> bool:
        """Return whether one of them differs by more than `share` of the other, or is known only here."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return any(a is not None and (b is None or abs(a / b - 1) > share) for a, b in pairs)
