"""Kinds of flash: how much can be written before they wear out, and the resulting cost of a written byte."""

from dataclasses import dataclass
from pathlib import Path

from port_agent.energy.sources.power_source import read_integer, read_text
from port_agent.energy.wear import ASSUMED_CYCLES, NAME, SECTOR_BYTES, block_device_of, parse_life_time
from port_planner.ir.costs import MediumKind

_JOULES_PER_KWH = 3.6e6
_GB = 1e9

ASSUMED_PRICE_PER_KWH = 0.30
"""Price of a kWh if `energy.price_per_kwh` is not set: the price for households in Europe (Eurostat
nrg_pc_204, 2024: 0.28 to 0.29 EUR).
"""

ASSUMED_BYTES = 32 * 10**9
"""Size in bytes of a medium that does not report it: the size of the card sold with most boards."""


_PRICE_PER_GB = {MediumKind.SD: 0.25, MediumKind.EMMC: 0.40, MediumKind.USB: 0.25, MediumKind.SSD: 0.12}
"""Price of a new medium per GB, in the currency of the electricity: a 32 GB card 8, a 64 GB eMMC module 25, a 256 GB
SSD 30 (street prices of 2025). Hard disks and compressed RAM are not worn out by writing."""


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium, its endurance and the price of a written byte.

    `endurance_bytes`: bytes that can be written in its life; None if writing does not wear it out. `assumed`: whether
    that figure is assumed. `wear_joules_per_byte`: the energy that the cost of a byte's wear would buy.
    """

    kind: MediumKind
    endurance_bytes: int | None
    assumed: bool
    wear_joules_per_byte: float


@dataclass(frozen=True, slots=True)
class FlashPrices:
    """The owner's prices of medium and electricity; None uses an assumed price.

    `medium`: price of the whole medium, 0 if its wear does not matter; `per_kwh`: price of
    electricity, in the same currency.
    """

    endurance_bytes: int | None = None
    medium: float | None = None
    per_kwh: float | None = None


def medium_under(folder: Path, prices: FlashPrices, root: Path = Path("/")) -> Medium:
    """Return the medium of `folder` as the kernel reports it; if unknown, an SD card, which wears fastest.

    Raises SourceError if the kernel's attributes cannot be read.
    """
    disk = block_device_of(folder, root)
    if disk is None:
        return medium_of(MediumKind.SD, prices)
    disk = _below(disk)
    size = read_integer(NAME, disk / "size") * SECTOR_BYTES if (disk / "size").exists() else None
    return medium_of(_kind(disk), prices, size)


def used_life(folder: Path, root: Path = Path("/")) -> float | None:
    """Return the share of its life that the medium of `folder` has used, by its registers; None if it has none.

    eMMC reports it to every user; an SD card has no such register, and NVMe and SATA report it only to root (an admin
    command). Raises SourceError if the register cannot be read.
    """
    disk = block_device_of(folder, root)
    path = None if disk is None else _below(disk) / "device/life_time"
    return parse_life_time(read_text(NAME, path)) if path is not None and path.exists() else None


def _below(disk: Path) -> Path:
    """Return the disk under an encrypted or logical volume."""
    while slaves := sorted((disk / "slaves").glob("*")):
        slave = slaves[0].resolve()
        disk = slave.parent if (slave / "partition").exists() else slave
    return disk


def _kind(disk: Path) -> MediumKind:
    if disk.name.startswith("mmcblk"):
        kind = disk / "device/type"  # "SD" or "MMC" (drivers/mmc/core/bus.c)
        return MediumKind.EMMC if kind.exists() and read_text(NAME, kind).strip() == "MMC" else MediumKind.SD
    if disk.name.startswith("zram"):
        return MediumKind.ZRAM
    rotational = disk / "queue/rotational"
    if rotational.exists() and read_integer(NAME, rotational) == 1:
        return MediumKind.DISK
    return MediumKind.USB if any(part.startswith("usb") for part in disk.parts) else MediumKind.SSD


def medium_of(kind: MediumKind, prices: FlashPrices, size_bytes: int | None = None) -> Medium:
    """Return a medium of this kind, with the owner's endurance and price, or those assumed for its kind and size."""
    if kind not in _PRICE_PER_GB:
        return Medium(kind, None, assumed=False, wear_joules_per_byte=0.0)
    size = size_bytes or ASSUMED_BYTES
    endurance = prices.endurance_bytes or size * ASSUMED_CYCLES
    worth = _PRICE_PER_GB[kind] * size / _GB if prices.medium is None else prices.medium
    joules = worth / (prices.per_kwh or ASSUMED_PRICE_PER_KWH) * _JOULES_PER_KWH
    return Medium(kind, endurance, prices.endurance_bytes is None, joules / endurance)
