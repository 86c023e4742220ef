"""From sensors to facts: one module per platform; every reading may fail alone."""

import sys
from collections.abc import Callable
from pathlib import Path

from port_agent.facts.platform import OwnUse, Platform, SensorOptions
from port_agent.facts.readings import Answer, Facts, Fault, IdleSignal, Power, PowerReading, ThrottleReading
from port_agent.facts.sensor_thread import SensorThread

__all__ = [
    "Answer",
    "Facts",
    "Fault",
    "IdleSignal",
    "OwnUse",
    "Platform",
    "Power",
    "PowerReading",
    "SensorOptions",
    "SensorThread",
    "ThrottleReading",
    "this_platform",
]


def this_platform(
    sys_root: Path = Path("/sys"),
    proc_root: Path = Path("/proc"),
    dev_root: Path = Path("/dev"),
    ups_amperes: Callable[[], float] | None = None,
) -> Platform:
    """Return the sensors of this machine. The roots and a UPS board (`facts/power_supply`) matter on Linux only."""
    if sys.platform == "darwin":
        from port_agent.facts.macos import MacPlatform
        from port_agent.facts.macos_power_events import PowerEvents

        try:
            return MacPlatform(PowerEvents())
        except OSError:  # pmset reports the same, a few seconds later
            return MacPlatform()
    from port_agent.facts.linux import LinuxPlatform

    return LinuxPlatform(sys_root, proc_root, dev_root, ups_amperes)
