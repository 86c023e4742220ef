"""The power that a machine takes from its battery, from the gauge's figures in /sys/class/power_supply.

There are several styles of gauges: POWER_NOW in uW; CURRENT_NOW in uA times VOLTAGE_NOW in uV (the sign of the current
differs between drivers); or only a level, ENERGY_NOW in uWh or CHARGE_NOW in uAh, whose decrease is the energy. A gauge
shows the machine's power only while it discharges: charging, resting and `Not charging` mean nothing.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from port_agent.energy.sources.power_source import (
    Coverage,
    Kind,
    SelfTest,
    SensorReading,
    SourceAbsent,
    SourceError,
    SourceInfo,
    parse_integer,
    plausible_watts,
    probe_by_reading,
    read_text,
)
from port_agent.facts.power_supply import Supply, parse_uevent, supply_from_uevent

NAME = "battery"
_FOLDER = "sys/class/power_supply"
_LINE = re.compile(r"[A-Z0-9_]+=[^\n]*")
_VOLTS_RANGE = (2.0, 100.0)
"""Plausible volts: from one empty lithium cell to a pack of 24 cells; a max17040 on a Pi reads 0.05 V
(raspberrypi/linux issue #2906).
"""


class Style(enum.Enum):
    """The figures that a gauge offers, best first."""

    POWER = "power"
    CURRENT = "current x voltage"
    ENERGY = "fall of energy"
    CHARGE = "fall of charge x voltage"


_NEEDED = {
    Style.POWER: ("POWER_NOW",),
    Style.CURRENT: ("CURRENT_NOW", "VOLTAGE_NOW"),
    Style.ENERGY: ("ENERGY_NOW",),
    Style.CHARGE: ("CHARGE_NOW", "VOLTAGE_NOW"),
}


@dataclass(frozen=True, slots=True)
class Gauge:
    """The figures of one battery at one moment, in watts and joules."""

    supply: Supply
    style: Style
    watts: float | None
    """Watts; None for the styles that only show a level."""
    level_joules: float | None
    """The remaining charge in joules; None unless the style needs it."""

    @property
    def discharging(self) -> bool:
        """Whether the machine runs from it. ONLINE=1 of a battery means present, not plugged in (axp20x)."""
        return self.supply.status == "discharging"


def style_of(values: Mapping[str, str]) -> Style | None:
    """Return the best style that these uevent values allow; None if they allow none."""
    return next((style for style, needed in _NEEDED.items() if all(key in values for key in needed)), None)


def parse_gauge(text: str, style: Style | None = None) -> Gauge:
    """Return the figures in a uevent file; raise `SourceError` if it is truncated, garbled or implausible.

    With `style`, the gauge must still offer that style, so that a torn file cannot change how energy is counted.
    """
    values = _values(text)
    chosen = style or style_of(values)
    if chosen is None or not all(key in values for key in _NEEDED[chosen]):
        wanted = " and ".join(_NEEDED[chosen]) if chosen else "power, current, energy or charge"
        raise SourceError(
            NAME, f"the gauge shows no {wanted}", "it cannot measure power; check its driver, or use another source"
        )
    numbers = {key: abs(parse_integer(NAME, values[key], key)) for key in _NEEDED[chosen]}
    volts = numbers.get("VOLTAGE_NOW", 0) / 1e6
    if "VOLTAGE_NOW" in numbers and not _VOLTS_RANGE[0] <= volts <= _VOLTS_RANGE[1]:
        raise SourceError(NAME, f"the gauge reads {volts:.3f} V, which no battery has", "check the fuel gauge's wiring")
    watts = level_joules = None
    if chosen is Style.POWER:
        watts = plausible_watts(NAME, numbers["POWER_NOW"] / 1e6)
    elif chosen is Style.CURRENT:
        watts = plausible_watts(NAME, numbers["CURRENT_NOW"] / 1e6 * volts)
    elif chosen is Style.ENERGY:
        level_joules = numbers["ENERGY_NOW"] * 3600 / 1e6
    else:
        level_joules = numbers["CHARGE_NOW"] * 3600 / 1e6 * volts
    return Gauge(supply_from_uevent(values), chosen, watts, level_joules)


def _values(text: str) -> dict[str, str]:
    if not text.endswith("\n"):
        raise SourceError(NAME, f"uevent truncated at {text[-30:]!r}", "a single torn read fixes itself")
    for line in text.splitlines():
        if not _LINE.fullmatch(line):
            raise SourceError(NAME, f"cannot read the uevent line {line[:40]!r}", "see dmesg for the gauge's driver")
    return parse_uevent(text)


class BatterySource:
    """All batteries of the machine together, without those of peripherals."""

    def __init__(self, root: Path) -> None:
        self._folder = root / _FOLDER
        self._styles = dict(self._find_batteries())
        if not self._styles:
            raise SourceAbsent(NAME, "there is no battery that shows a figure", "use another source")
        levels_only = all(style in (Style.ENERGY, Style.CHARGE) for style in self._styles.values())
        self._used_joules = 0.0
        self._last_levels: dict[Path, float] = {}
        self._levels_only = levels_only
        self.info = SourceInfo(
            NAME,
            Kind.MEASURED,
            Coverage.BATTERY,
            "the whole machine, only while it runs from its battery: "
            + ", ".join(f"{path.name} ({style.value})" for path, style in self._styles.items()),
            resolution_watts=None if levels_only else 0.001,
            period_s=30.0 if levels_only else 5.0,  # gauges update every 1 to 30 s and cost an I2C or EC transfer
        )

    def _find_batteries(self) -> list[tuple[Path, Style]]:
        found = []
        for path in sorted(self._folder.glob("*")):
            if not (path / "uevent").exists():
                continue
            values = _values(read_text(NAME, path / "uevent") + "\n")
            supply = supply_from_uevent({"NAME": path.name, **values})
            style = style_of(values)
            if supply.kind == "battery" and supply.present and not supply.peripheral and style is not None:
                found.append((path, style))
        return found

    def read(self, now_s: float) -> SensorReading | None:
        """Return the current power of the batteries; None while none discharges or a supply is plugged in.

        Raises `SourceError` if a battery that was present fails.
        """
        gauges = {
            path: parse_gauge(read_text(NAME, path / "uevent") + "\n", style) for path, style in self._styles.items()
        }
        if self._plugged_in() or not any(gauge.discharging for gauge in gauges.values()):
            self._last_levels = {}
            return None
        if not self._levels_only:
            return SensorReading(
                now_s, watts=sum(g.watts for g in gauges.values() if g.discharging and g.watts is not None)
            )
        levels = {path: g.level_joules for path, g in gauges.items() if g.level_joules is not None}
        self._used_joules += sum(self._last_levels.get(path, level) - level for path, level in levels.items())
        self._last_levels = levels
        return SensorReading(now_s, counter_joules=self._used_joules)

    def _plugged_in(self) -> bool:
        for path in self._folder.glob("*"):
            if path not in self._styles and (path / "uevent").exists():
                supply = supply_from_uevent({"NAME": path.name, **_values(read_text(NAME, path / "uevent") + "\n")})
                if supply.is_source and not supply.peripheral and supply.online.value == "yes":
                    return True
        return False

    def self_test(self, now_s: float) -> SelfTest:
        """Return whether the gauges can be read."""
        return probe_by_reading(self, now_s)

    def close(self) -> None:
        """Do nothing: no file stays open."""
