"""Compare the bytes written to flash with the budget and the card's endurance.

It counts the bytes of the agent itself and of the whole machine.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from port_agent.energy.sources.power_source import SourceError, read_integer, read_text

NAME = "flash-wear"
SECTOR_BYTES = 512
"""Unit of /sys/block/*/stat, whatever the device's own sector size (Documentation/block/stat.rst)."""
_WRITTEN_SECTORS_FIELD = 6
ASSUMED_CYCLES = 600
"""Program and erase cycles of consumer flash (TLC) if no endurance was given.

This is what makers of SSDs promise (TBW over capacity, such as 150 TB of 250 GB). The daily budget of the policy
assumes the same (deploy/config.toml).
"""
_LIFE_STEPS = {0: None, **{step: step * 0.1 for step in range(1, 11)}, 11: 1.0}
"""Share of life per step of eMMC 5's life_time estimate: 0x01 means 0 % to 10 %, 0x0b past its life
(JEDEC JESD84-B51, 7.4.22).
"""


@dataclass(frozen=True, slots=True)
class WearOutlook:
    """How long a flash device lasts at the present rate of writing."""

    bytes_per_day: float
    endurance_bytes: int | None
    years_left: float | None
    """Years until the medium is worn out; None if nothing is written or the endurance is not known."""
    assumed: bool = False
    """Whether the endurance is assumed: the device's size times `ASSUMED_CYCLES`."""


def outlook(
    written_bytes: int,
    days: float,
    endurance_bytes: int | None,
    used_fraction: float = 0.0,
    size_bytes: int | None = None,
) -> WearOutlook:
    """Return the outlook for `written_bytes` in `days`.

    On a device that can take `endurance_bytes` in its life.

    Without that figure it is assumed from the size of the device.
    """
    rate = written_bytes / days if days > 0 else 0.0
    assumed = endurance_bytes is None and size_bytes is not None
    if endurance_bytes is None and size_bytes is not None:
        endurance_bytes = size_bytes * ASSUMED_CYCLES
    years = None
    if endurance_bytes is not None and rate > 0:
        years = endurance_bytes * max(1.0 - used_fraction, 0.0) / rate / 365.25
    return WearOutlook(rate, endurance_bytes, years, assumed)


def block_device_of(path: Path, root: Path) -> Path | None:
    """Return the sysfs folder of the whole disk that holds `path`, or None for a file system without one (tmpfs)."""
    device = path.stat().st_dev
    folder = root / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}"
    if not folder.exists():
        return None
    folder = folder.resolve()
    return folder.parent if (folder / "partition").exists() else folder


def parse_written_bytes(text: str) -> int:
    """Return the bytes written since boot by a line of /sys/block/*/stat.

    Raises `SourceError` if the line has another format.
    """
    fields = text.split()
    if len(fields) < 11 or not all(field.isdigit() for field in fields):
        raise SourceError(NAME, f"cannot read the block statistics {text[:60]!r}", "see the kernel's release notes")
    return int(fields[_WRITTEN_SECTORS_FIELD]) * SECTOR_BYTES


def parse_life_time(text: str) -> float | None:
    """Return the used share of an eMMC's life (the worse of its two estimates); None if it is not reported.

    Raises SourceError for another text.
    """
    steps = []
    for word in text.split():
        try:
            steps.append(int(word, 16))
        except ValueError as error:
            raise SourceError(NAME, f"cannot read the life estimate {text[:40]!r}", "see mmc-utils extcsd") from error
    if not steps or any(step not in _LIFE_STEPS for step in steps):
        raise SourceError(NAME, f"life estimate {text[:40]!r} is outside its scale", "see mmc-utils extcsd")
    known = [used for used in (_LIFE_STEPS[step] for step in steps) if used is not None]
    return max(known, default=None)


class DiskCounter:
    """Bytes written to the disk under a folder, since the last call."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._disk = block_device_of(folder, root)
        self._last: int | None = None

    @property
    def name(self) -> str:
        """The disk's kernel name; empty when the folder is not on one."""
        return self._disk.name if self._disk else ""

    def written_since_last(self) -> int | None:
        """Return bytes written since the last call.

        None on the first, without a disk, or after a counter reset.

        Raises `SourceError` if the statistics cannot be read.
        """
        if self._disk is None:
            return None
        now = parse_written_bytes(read_text(NAME, self._disk / "stat"))
        last, self._last = self._last, now
        return now - last if last is not None and now >= last else None

    def flash_bytes(self) -> int | None:
        """Return the size of the disk if it is flash; None for a rotating disk, or an unknown one.

        Raises `SourceError` if its attributes cannot be read.
        """
        if self._disk is None or not (self._disk / "size").exists() or not (self._disk / "queue/rotational").exists():
            return None
        if read_integer(NAME, self._disk / "queue/rotational") != 0:
            return None
        return read_integer(NAME, self._disk / "size") * SECTOR_BYTES

    def used_life(self) -> float | None:
        """Return the share of an eMMC's life already used; None for devices that do not report it."""
        path = self._disk / "device/life_time" if self._disk else None
        return parse_life_time(read_text(NAME, path)) if path is not None and path.exists() else None
