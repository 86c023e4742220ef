"""Power of a Jetson board from its INA3221 sensors: volts times amperes per channel.

Three layouts (ml-energy/zeus PR #226, jetson_stats issues #131 and #428): driver `ina3221` since L4T 35 and `ina3221x`
before it, both with hwmon files; and `ina3221x` with iio files up to JetPack 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from port_agent.energy.sources.jetson_rails import BoardTotal, board_total
from port_agent.energy.sources.power_source import (
    GpuReading,
    Kind,
    SelfTest,
    SensorReading,
    SourceAbsent,
    SourceError,
    SourceInfo,
    plausible_watts,
    probe_by_reading,
    read_integer,
    read_text,
)

NAME = "ina3221"
_DRIVERS = ("sys/bus/i2c/drivers/ina3221", "sys/bus/i2c/drivers/ina3221x")
_UNCONNECTED = "NC"


@dataclass(frozen=True, slots=True)
class RailChannel:
    """One measured rail, and the two files from which its power is computed."""

    rail: str
    millivolts: Path
    milliamperes: Path

    def watts(self) -> float:
        """Return the rail's power now; raise `SourceError` if either file fails.

        Current may read a few mA below zero on an unloaded rail (offset of the amplifier); that is zero.
        """
        millivolts = read_integer(NAME, self.millivolts)
        milliamperes = read_integer(NAME, self.milliamperes)
        if not 0 <= millivolts <= 32_760 or not -50 <= milliamperes <= 100_000:  # 26 V part; 32.76 V full scale
            raise SourceError(
                NAME,
                f"{self.rail} reads {millivolts} mV and {milliamperes} mA, outside the sensor's range",
                "see dmesg for I2C errors",
            )
        return millivolts * max(milliamperes, 0) / 1e6


def find_channels(root: Path) -> tuple[RailChannel, ...]:
    """Return every connected rail; raises `SourceAbsent` without an INA3221."""
    channels = [
        channel
        for driver in _DRIVERS
        if (root / driver).is_dir()
        for device in sorted((root / driver).iterdir())
        if device.is_dir()
        for channel in (*_hwmon_channels(device), *_iio_channels(device))
    ]
    if not channels:
        raise SourceAbsent(NAME, "there is no INA3221 sensor", "only Jetson boards have one; use another source")
    return tuple(channels)


def _hwmon_channels(device: Path) -> Iterator[RailChannel]:
    for folder in sorted(device.glob("hwmon/hwmon*")):
        # Only 1 to 3 are channels. in4 to in6 are shunt voltages, in7 is their sum under a label of its own.
        for number in (1, 2, 3):
            label = folder / f"in{number}_label"
            if label.exists():
                rail = read_text(NAME, label)
                if rail != _UNCONNECTED:
                    yield RailChannel(rail, folder / f"in{number}_input", folder / f"curr{number}_input")


def _iio_channels(device: Path) -> Iterator[RailChannel]:
    for folder in sorted(device.glob("iio:device*")):
        for number in (0, 1, 2):
            label = folder / f"rail_name_{number}"
            if label.exists():
                rail = read_text(NAME, label)
                if rail != _UNCONNECTED:
                    yield RailChannel(rail, folder / f"in_voltage{number}_input", folder / f"in_current{number}_input")


class Ina3221Source:
    """The board's total power from its input rails; the GPU's rail is a part of it."""

    def __init__(self, root: Path) -> None:
        channels = {channel.rail: channel for channel in find_channels(root)}
        chosen: BoardTotal = board_total(NAME, dict.fromkeys(channels, 0.0))
        self.channels = tuple(channels[rail] for rail in chosen.rails)
        self._gpu = chosen.gpu
        self._gpu_channel = None if chosen.gpu is None else channels[chosen.gpu.name]
        self.info = SourceInfo(
            NAME,
            Kind.MEASURED,
            chosen.coverage,
            chosen.covers,
            # 40 uV per shunt step over 5 mOhm is 8 mA (INA3221 datasheet; shunts from the Orin device tree), at 5 V.
            resolution_watts=0.04 * len(self.channels),
            period_s=1.0,
        )

    def read(self, now_s: float) -> SensorReading:
        """Return the total power now; raise `SourceError` if any of its rails fails."""
        watts = plausible_watts(NAME, sum(channel.watts() for channel in self.channels))
        return SensorReading(now_s, watts=watts, gpu=self._gpu_reading())

    def _gpu_reading(self) -> GpuReading | None:
        """Return the power of the GPU's rail; None if there is none or it fails, which `self_test` reports."""
        if self._gpu is None or self._gpu_channel is None:
            return None
        try:
            watts = self._gpu_channel.watts()
        except SourceError:
            return None
        return GpuReading(watts, f"{self._gpu.name}, which feeds {self._gpu.feeds}")

    def self_test(self, now_s: float) -> SelfTest:
        """Return whether the rails of the total and of the GPU can be read, and the GPU's power."""
        test = probe_by_reading(self, now_s)
        if not test.ok or self._gpu is None or self._gpu_channel is None:
            return test
        try:
            watts = self._gpu_channel.watts()
        except SourceError as error:
            return SelfTest(True, f"{test.text}, but {self._gpu.name} fails: {error.problem}", error.remedy)
        return SelfTest(True, f"{test.text}, {self._gpu.reads(watts)}")

    def close(self) -> None:
        """Do nothing: no file stays open."""
