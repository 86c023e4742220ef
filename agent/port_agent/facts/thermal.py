"""Temperature and throttling on Linux: thermal zones, hwmon, and the Raspberry Pi firmware's bits."""

import errno
import re
from collections.abc import Iterable
from pathlib import Path

from port_agent.facts.readings import Answer, ThrottleReading
from port_agent.facts.sysfs import Tree

SENSOR = "temperature"
_PLAUSIBLE_C = range(-40, 151)
"""Range of plausible degrees Celsius: a Jetson reports -256 for a zone that is switched off,
and no chip survives 150.
"""

_FOREIGN_ZONES = ("pmic-die", "iwlwifi", "bat", "ath10k", "ath11k")
"""Zones that do not show the processor's heat: PMIC-Die is a constant on Jetsons; radios and batteries do not
warm from training alone.
"""

_CPU_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal")

_BITS_NOW = {0: "under-voltage", 1: "ARM frequency capped", 2: "throttled", 3: "soft temperature limit"}
"""Bits of the Pi firmware's get_throttled that describe the present; 16 to 19 mean the same
since boot and never reset.
"""

_THROTTLING = "throttling"
_PI_BUS, _PI_FIRMWARE = re.compile(r"soc.*"), re.compile(r"soc.*:firmware")
"""Folders below /sys/devices/platform: `soc/soc:firmware` up to a Pi 4; a Pi 5 has the address of its bus in both names
(`soc@107c000000`).
"""


class TemperatureSensor:
    """The hottest of the processor's thermometers, read repeatedly.

    A thermometer that once gave a value is reported when it vanishes.
    """

    def __init__(self) -> None:
        self._seen: set[Path] = set()

    def read(self, tree: Tree) -> float | None:
        """Return degrees Celsius, or None. Zones do not replace chips: the zone of a PC's firmware may be a constant.

        A thermometer that gave a value and is gone or fails, and one that hangs, is a fault of `temperature`; others
        that fail are faults of their own: some never give a value.
        """
        values = _read_zones(tree) | _read_chips(tree)
        found = {place: value / 1000.0 for place, value in values.items() if value is not None}
        failing = {fault.sensor for fault in tree.faults}
        for place in sorted((self._seen | values.keys()) - found.keys()):
            lost = place in self._seen and (_sensor(place) in failing or _has_vanished(tree, place, found))
            if place in tree.silent or lost:
                tree.fault(SENSOR, f"{place} has vanished, or does not answer")
        if self._seen and not found:
            tree.fault(SENSOR, "no thermometer gives a plausible value any longer")
        self._seen |= found.keys()
        return max(found.values(), default=None)


def _read_zones(tree: Tree) -> dict[Path, int | None]:
    """Return thousandths of a degree by file, None for an implausible value."""
    return {
        zone / "temp": _plausible(tree, zone / "temp")
        for zone in tree.children(tree.sys / "class/thermal", SENSOR)
        if zone.name.startswith("thermal_zone")
        and not (tree.text(zone / "type", f"{SENSOR}/{zone.name}") or "").lower().startswith(_FOREIGN_ZONES)
    }


def _read_chips(tree: Tree) -> dict[Path, int | None]:
    """Return the same for the processor's hwmon chips."""
    return {
        entry: _plausible(tree, entry)
        for chip in tree.children(tree.sys / "class/hwmon", SENSOR)
        if tree.text(chip / "name", f"{SENSOR}/{chip.name}") in _CPU_CHIPS
        for entry in tree.children(chip, SENSOR)
        if re.fullmatch(r"temp\d+_input", entry.name)
    }


def _has_vanished(tree: Tree, place: Path, found: Iterable[Path]) -> bool:
    """Return whether a thermometer vanished together with others of its chip: a core that is switched
    off takes its own with it.
    """
    beside = any(other.parent == place.parent for other in found)
    return not beside and tree.stat(place, _sensor(place)) is None


def _sensor(place: Path) -> str:
    return f"{SENSOR}/{place.parent.name}"


def _plausible(tree: Tree, place: Path) -> int | None:
    """Return a zone's reading; None without a fault for EAGAIN: an Orin answers this for parts that it
    lacks or has switched off.
    """
    value = tree.number(place, _sensor(place), absent=(errno.EAGAIN,))
    return value if value is not None and value // 1000 in _PLAUSIBLE_C else None


def parse_throttled(text: str) -> ThrottleReading | None:
    """Parse the Pi firmware's state, from `throttled=0x50005` (vcgencmd) or `50005` (sysfs)."""
    match = re.fullmatch(r"(?:throttled=0x)?([0-9a-fA-F]+)", text.strip())
    if match is None:
        return None
    bits = int(match[1], 16)
    active = [name for bit, name in _BITS_NOW.items() if bits >> bit & 1]
    return ThrottleReading(
        now=Answer.YES if active else Answer.NO,
        detail=", ".join(active),
        since_boot=Answer.YES if bits >> 16 & 0xF else Answer.NO,
    )


def read_throttled(tree: Tree) -> ThrottleReading | None:
    """Return the Pi firmware's throttling state from sysfs, or None if there is no such file."""
    for bus in tree.children(tree.sys / "devices/platform", _THROTTLING):
        for firmware in tree.children(bus, _THROTTLING) if _PI_BUS.fullmatch(bus.name) else ():
            place = firmware / "get_throttled"
            text = tree.text(place, _THROTTLING) if _PI_FIRMWARE.fullmatch(firmware.name) else None
            if text is None:
                continue
            reading = parse_throttled(text)
            if reading is None:
                tree.fault(_THROTTLING, f"{place}: cannot read {text[:40]!r}")
            return reading
    return None
