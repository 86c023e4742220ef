"""Temperature and throttling on Linux: thermal zones, hwmon, and the Raspberry Pi firmware's bits."""

import re
from pathlib import Path

from port_agent.facts.readings import Answer, ThrottleReading
from port_agent.facts.sysfs import Tree

_PLAUSIBLE_C = range(-40, 151)
"""A Jetson reports -256 °C for a zone that is switched off; no chip survives 150 °C."""

_FOREIGN_ZONES = ("pmic-die", "iwlwifi", "bat", "ath10k", "ath11k")
"""PMIC-Die is a constant on Jetsons; radios and batteries do not warm from training alone."""

_CPU_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal")

_BITS_NOW = {0: "under-voltage", 1: "ARM frequency capped", 2: "throttled", 3: "soft temperature limit"}
"""Bits of the Pi firmware's get_throttled that hold now; 16 to 19 are the same since boot and never reset."""

_PI_FIRMWARE = Path("devices/platform/soc/soc:firmware/get_throttled")


def read_temperature(tree: Tree) -> float | None:
    """Return the hottest plausible temperature of the processor in degrees Celsius, or None."""
    zones = [
        value / 1000.0
        for zone in tree.children(tree.sys / "class/thermal", "temperature")
        if zone.name.startswith("thermal_zone") and (value := _read_zone(tree, zone)) is not None
    ]
    return max([*zones, *([] if zones else _hwmon_temperatures(tree))], default=None)


def _read_zone(tree: Tree, zone: Path) -> int | None:
    kind = (tree.text(zone / "type", f"temperature/{zone.name}") or "").lower()
    if kind.startswith(_FOREIGN_ZONES):
        return None
    value = tree.number(zone / "temp", f"temperature/{zone.name}")
    return value if value is not None and value // 1000 in _PLAUSIBLE_C else None


def _hwmon_temperatures(tree: Tree) -> list[float]:
    found = []
    for chip in tree.children(tree.sys / "class/hwmon", "temperature"):
        if tree.text(chip / "name", f"temperature/{chip.name}") not in _CPU_CHIPS:
            continue
        for entry in tree.children(chip, "temperature"):
            if re.fullmatch(r"temp\d+_input", entry.name):
                value = tree.number(entry, f"temperature/{chip.name}")
                if value is not None and value // 1000 in _PLAUSIBLE_C:
                    found.append(value / 1000.0)
    return found


def parse_throttled(text: str) -> ThrottleReading | None:
    """Return what the Pi firmware says, from `throttled=0x50005` (vcgencmd) or `50005` (sysfs)."""
    match = re.search(r"(?:throttled=)?(?:0x)?([0-9a-fA-F]+)\s*$", text.strip())
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
    """Return the Pi firmware's throttling state from sysfs, or None where there is no such file."""
    text = tree.text(tree.sys / _PI_FIRMWARE, "throttling")
    if text is None:
        return None
    reading = parse_throttled(text)
    if reading is None:
        tree.fault("throttling", f"{_PI_FIRMWARE}: cannot read {text[:40]!r}")
    return reading


def parse_measure_temp(text: str) -> float | None:
    """Return degrees Celsius from `temp=48.3'C`."""
    match = re.search(r"temp=(-?\d+(?:\.\d+)?)'C", text)
    return float(match[1]) if match else None
