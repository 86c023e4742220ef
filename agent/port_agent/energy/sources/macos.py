"""Power of a Mac.

`powermetrics` (root only) and the battery's own registers (`ioreg`).

powermetrics on Apple silicon printed `Package Power` up to macOS 12 and `Combined Power (CPU + GPU + ANE)` since;
Intel Macs print one line of the processor's energy model. AppleSmartBattery currents are signed 64-bit numbers that
ioreg prints unsigned.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from port_agent.energy.sources.power_source import Coverage, GpuReading, Kind, SourceError, SourceInfo, plausible_watts
from port_agent.energy.sources.subprocess_source import ChildOutput, ToolSource, command_output

POWERMETRICS = "powermetrics"
BATTERY = "mac-battery"
POWERMETRICS_COMMAND = ("powermetrics", "--samplers", "cpu_power,gpu_power", "-i", "1000")
BATTERY_COMMAND = ("ioreg", "-r", "-n", "AppleSmartBattery", "-w", "0")
_TOTALS = (
    r"Combined Power \(CPU \+ GPU \+ ANE\): (\d+) mW\n",
    r"Package Power: (\d+) mW\n",
    r"Intel energy model derived package power \(CPUs\+GT\+SA\): (\d+\.\d+)W\n",
)
RECORD_END = "|".join(total.replace("(\\d", "(?:\\d") for total in _TOTALS)
_TOTAL = re.compile("|".join(f"(?:^{total})" for total in _TOTALS), re.MULTILINE)
_COMPONENT = re.compile(r"^(CPU|GPU|ANE|DRAM) Power: (\d+) mW\n", re.MULTILINE)
_ELAPSED = re.compile(r"\((\d+(?:\.\d+)?)ms elapsed\)")
_POWERMETRICS_REMEDY = "powermetrics needs root; `sudo powermetrics -n 1` shows whether it works"


@dataclass(frozen=True, slots=True)
class PowermetricsSample:
    """One sample of powermetrics."""

    watts: float
    components: dict[str, float]
    """Watts of CPU, GPU, ANE and DRAM, as far as printed."""
    elapsed_s: float | None

    @property
    def gpu(self) -> GpuReading | None:
        """The GPU's part of the total; None if that was not printed."""
        watts = self.components.get("GPU")
        return None if watts is None else GpuReading(watts, "the GPU alone, by Apple's energy model")


def parse_powermetrics(text: str) -> PowermetricsSample:
    """Return the one sample in `text`; raise `SourceError` if its total line is missing, torn or garbled."""
    found = list(_TOTAL.finditer(text))
    if len(found) != 1:
        raise SourceError(POWERMETRICS, f"{len(found)} totals in one sample, not one", _POWERMETRICS_REMEDY)
    combined, package, intel = found[0].groups()
    watts = float(intel) if intel else int(combined or package) / 1000
    components = {name: int(milliwatts) / 1000 for name, milliwatts in _COMPONENT.findall(text)}
    _check_parts(watts, components, exact=combined is not None)
    elapsed = _ELAPSED.search(text)
    elapsed_s = float(elapsed[1]) / 1000 if elapsed else None
    return PowermetricsSample(plausible_watts(POWERMETRICS, watts), components, elapsed_s)


def _check_parts(watts: float, components: dict[str, float], exact: bool) -> None:
    """Raise `SourceError` unless the parts add up to `Combined Power`, or are within `Package Power`."""
    parts = [components.get(name) for name in ("CPU", "GPU", "ANE")]
    known = sum(part for part in parts if part is not None)
    rounding = 0.001 * (len(parts) + 1)
    if watts < known - rounding or (exact and None not in parts and watts > known + rounding):
        raise SourceError(
            POWERMETRICS, f"total of {watts} W does not fit its parts of {known:.3f} W", _POWERMETRICS_REMEDY
        )


def powermetrics_source(output: ChildOutput) -> ToolSource:
    """Return a source of the newest sample from a `powermetrics` that runs as a child process."""
    info = SourceInfo(
        POWERMETRICS,
        Kind.MEASURED,
        Coverage.PACKAGE,
        "processor, GPU and neural engine by Apple's energy model; not screen, disk, radio",
        resolution_watts=0.001,
        period_s=1.0,
    )
    return ToolSource(
        info,
        output.newest,
        lambda text: parse_powermetrics(text).watts,
        output.close,
        lambda text: parse_powermetrics(text).gpu,
    )


@dataclass(frozen=True, slots=True)
class SmartBattery:
    """The registers of AppleSmartBattery that show power."""

    volts: float
    amperes: float
    """Current in amperes, positive while charging."""
    charging: bool

    @property
    def board_watts(self) -> float | None:
        """The power that the Mac takes from its battery; None unless it discharges."""
        return self.volts * -self.amperes if self.amperes < 0 and not self.charging else None


_REGISTER = r'^\s*"{}" = (\S+)\n'
_PLIST_REGISTER = r"<key>{}</key>\s*<integer>([^<]*)</integer>\n"
_BATTERY_REMEDY = "run `ioreg -r -n AppleSmartBattery` to see what it prints; a desktop Mac has no battery"


def parse_smart_battery(text: str) -> SmartBattery:
    """Return the registers in ioreg's output; raise `SourceError` if one is missing, torn or garbled."""
    volts = read_register(text, "Voltage") / 1000
    amperes = read_register(text, "InstantAmperage") / 1000
    state = re.search(_REGISTER.format("IsCharging"), text, re.MULTILINE)
    if not state or state[1] not in ("Yes", "No"):
        raise SourceError(BATTERY, "IsCharging is missing or neither Yes nor No", _BATTERY_REMEDY)
    if not 2 <= volts <= 30 or abs(amperes) > 30:
        raise SourceError(BATTERY, f"reads {volts:g} V and {amperes:g} A, which no Mac has", _BATTERY_REMEDY)
    return SmartBattery(volts, amperes, state[1] == "Yes")


def read_register(text: str, name: str) -> int:
    """Return a number from ioreg's output, in its own form or as a property list (`ioreg -a`).

    Its own form prints negative numbers as unsigned 64-bit ones. Raises `SourceError` if the number is missing or torn.
    """
    match = re.search(_REGISTER.format(name), text, re.MULTILINE) or re.search(_PLIST_REGISTER.format(name), text)
    if not match or not re.fullmatch(r"-?\d{1,20}", match[1]):
        raise SourceError(BATTERY, f"{name} is missing or not a whole number", _BATTERY_REMEDY)
    value = int(match[1])
    return value - (1 << 64) if value >= 1 << 63 else value


def read_smart_battery() -> str:
    """Return ioreg's output about the battery; raise `SourceError` if it fails."""
    return command_output(BATTERY, BATTERY_COMMAND, _BATTERY_REMEDY)


def mac_battery_source(read_registers: Callable[[], str] = read_smart_battery) -> ToolSource:
    """Return a source of the power that a MacBook takes from its battery; it has nothing to measure
    unless the battery discharges.
    """
    info = SourceInfo(
        BATTERY,
        Kind.MEASURED,
        Coverage.BATTERY,
        "the whole Mac, only while it runs from its battery",
        resolution_watts=0.012,  # 1 mA at 12 V
        period_s=10.0,  # each reading starts a process
    )
    return ToolSource(info, lambda _: read_registers(), lambda text: parse_smart_battery(text).board_watts)
