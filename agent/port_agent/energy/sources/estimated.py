"""Power computed from a model of the board, for machines without a sensor.

Its figures are always labelled `estimated`.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from port_agent.energy.sources.power_source import Coverage, Kind, SelfTest, SensorReading, SourceInfo
from port_agent.facts.idle import parse_stat

NAME = "estimated"
_STAT, _TICKS_PER_S = Path("/proc/stat"), os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class PowerModel:
    """The power of a board as a linear function of processor load, plus joules per byte moved to and from flash."""

    name: str
    static_watts: float
    """Watts of the board while it is switched on and idle."""
    full_watts: float
    """Watts with all cores busy."""
    read_joules_per_byte: float = 0.0
    write_joules_per_byte: float = 0.0
    origin: str = "board file"
    one_core_watts: float | None = None
    """Watts that one busy core adds; None: an equal share of what all cores add."""
    moving_share: float = 1.0
    """Power above rest of operators that are bound by memory, as a share of that of compute-bound ones."""

    @property
    def compute_watts(self) -> float:
        """Watts that full load adds to the idle board."""
        return self.full_watts - self.static_watts


def generic_model(cores: int, machine: str = "") -> PowerModel:
    """Return a model for a board without a board file, marked as a guess.

    1.5 W idle and 1.0 W per busy core lie between a Pi 4 (0.9 W per A72 core) and a laptop (2 to 5 W).
    """
    return PowerModel(
        f"unknown board ({machine or 'nameless'})",
        1.5,
        1.5 + 1.0 * cores,
        origin=f"a guess: 1.5 W, and 1 W for each of {cores} cores while busy; right within a factor of two for small "
        "boards and laptops, too low for desktops and servers",
    )


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Processor time since boot over all cores, in seconds."""

    busy_s: float
    total_s: float


def read_cpu_time() -> CpuTime:
    """Return the processor time since boot; raises OSError."""
    if sys.platform != "linux":
        return _cpu_time_by_psutil()
    with _STAT.open() as stream:
        ticks = parse_stat(stream.readline())
    return (
        CpuTime(ticks.busy / _TICKS_PER_S, ticks.total / _TICKS_PER_S) if ticks is not None else _cpu_time_by_psutil()
    )


def _cpu_time_by_psutil() -> CpuTime:
    import psutil  # only here: on Linux the supervisor does not load it

    times = psutil.cpu_times()
    return CpuTime(sum(times) - times.idle, sum(times))


class LoadProbe:
    """The share of processor time that was busy between two calls."""

    def __init__(self, read: Callable[[], CpuTime] = read_cpu_time) -> None:
        self._read = read
        self._last = read()

    def busy_fraction(self) -> float | None:
        """Return the busy share since the last call, 0 to 1; None if no time passed on any core."""
        last, self._last = self._last, self._read()
        total_s = self._last.total_s - last.total_s
        if total_s <= 0:
            return None
        return min(max((self._last.busy_s - last.busy_s) / total_s, 0.0), 1.0)


class EstimatedSource:
    """Energy by the board's model: idle watts, processor load, bytes moved."""

    def __init__(self, model: PowerModel, load: LoadProbe | None = None) -> None:
        self.model = model
        self._load = load or LoadProbe()
        self._last_s: float | None = None
        self._last_fraction = 0.0
        self._total_joules = 0.0
        self.info = SourceInfo(
            NAME,
            Kind.ESTIMATED,
            Coverage.BOARD,
            f"{model.name}: {model.static_watts:g} W idle to {model.full_watts:g} W at full load ({model.origin})",
            resolution_watts=None,
            period_s=1.0,
        )

    def read(self, now_s: float) -> SensorReading:
        """Return the estimated energy since opening."""
        if self._last_s is None:
            self._load.busy_fraction()
        else:
            fraction = self._load.busy_fraction()
            self._last_fraction = self._last_fraction if fraction is None else fraction
            watts = self.model.static_watts + self._last_fraction * self.model.compute_watts
            self._total_joules += watts * max(now_s - self._last_s, 0.0)
        self._last_s = now_s
        return SensorReading(now_s, counter_joules=self._total_joules)

    def note_transfer(self, read_bytes: int, written_bytes: int) -> None:
        """Add the modelled energy of moving these bytes, which processor load does not show."""
        self._total_joules += read_bytes * self.model.read_joules_per_byte
        self._total_joules += written_bytes * self.model.write_joules_per_byte

    def self_test(self, now_s: float) -> SelfTest:
        """Return the model's assumptions: an estimate always works."""
        return SelfTest(
            True,
            "a model of the board, not a sensor",
            "measure idle and full load at the plug and set energy.static_watts and energy.full_watts",
        )

    def close(self) -> None:
        """Do nothing: no file stays open."""
