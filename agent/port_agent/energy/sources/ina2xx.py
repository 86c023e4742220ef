"""INA219, INA226, INA238 and INA260 chips on HATs, on UPS boards and in the input line of a Jetson Thor.

They are read by the kernel's hwmon driver, or directly over I2C.

What such a chip measures depends on its wire, which no file describes. In a supply line it measures what the board
draws. On a UPS HAT it measures what flows into and out of the battery. A negative current then feeds the board
(networkupstools/nut issue #2960); a positive one charges the battery and does not show the board's power.
"""

import enum
import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from port_agent.energy.sources.power_source import (
    Coverage,
    Kind,
    SelfTest,
    SensorReading,
    SourceError,
    SourceInfo,
    plausible_watts,
    probe_by_reading,
    read_integer,
    read_text,
)

NAME = "ina2xx"
CHIPS = ("ina219", "ina220", "ina226", "ina230", "ina231", "ina238", "ina260")
"""Names of the chips. The INA238 measures up to 85 V, in the input line of a Jetson Thor."""

_MAX_VOLTS = 85


class Wire(enum.Enum):
    """The wire in which the chip sits: `energy.ina2xx_wire`."""

    SUPPLY = "supply"
    UPS = "ups"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class BusReading:
    """Voltage and signed current of the measured wire."""

    volts: float
    amperes: float

    def board_watts(self, wire: Wire) -> float | None:
        """Return the power that the board draws through `wire`; None while a battery charges or rests.

        With an unknown wire, only a negative current counts: a battery that feeds the board, or a supply line measured
        in reverse. Both mean the same power.
        """
        if wire is Wire.SUPPLY:
            return self.volts * abs(self.amperes)
        return self.volts * -self.amperes if self.amperes < 0 else None


def find_hwmon(root: Path) -> Path | None:
    """Return the hwmon directory of the first chip of this family; None if there is none."""
    for folder in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        name = folder / "name"
        if name.exists() and read_text(NAME, name) in CHIPS:
            return folder
    return None


def read_hwmon(folder: Path) -> BusReading:
    """Return voltage (in1, mV) and current (curr1, mA) of a hwmon folder.

    Raises `SourceError` if one fails.

    power1_input is not used: its register has no sign.
    """
    return BusReading(
        read_integer(NAME, folder / "in1_input") / 1000, read_integer(NAME, folder / "curr1_input") / 1000
    )


_I2C_SLAVE = 0x0703  # linux/i2c-dev.h
_SHUNT_REGISTER, _BUS_REGISTER = 0x01, 0x02


def decode_registers(shunt_register: int, bus_register: int, shunt_ohms: float) -> BusReading:
    """Return the meaning of two raw registers of an INA219 (datasheet SBOS448G, 8.6.3).

    The steps are 10 uV and 4 mV.

    Raises `SourceError` when the chip flags an overflow (bit 0 of the bus register).
    """
    if bus_register & 1:
        raise SourceError(NAME, "the chip reports a current beyond its range", "see the HAT's shunt and gain setting")
    shunt_steps = shunt_register - 0x10000 if shunt_register & 0x8000 else shunt_register
    return BusReading((bus_register >> 3) * 0.004, shunt_steps * 10e-6 / shunt_ohms)


def read_i2c(device: Path, address: int, shunt_ohms: float) -> BusReading:
    """Return a reading of an INA219 at `address` of the I2C bus `device`.

    This is for HATs without a kernel driver.

    Raises SourceError where the bus cannot be opened or nothing answers.
    """
    try:
        handle = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(handle, _I2C_SLAVE, address)
            registers = []
            for register in (_SHUNT_REGISTER, _BUS_REGISTER):
                os.write(handle, bytes([register]))
                registers.append(int.from_bytes(os.read(handle, 2), "big"))
        finally:
            os.close(handle)
    except OSError as error:
        raise SourceError(
            NAME,
            f"no answer from {device} address {address:#x} ({error})",
            "check `i2cdetect -y`, group `i2c` and the HAT",
        ) from error
    return decode_registers(registers[0], registers[1], shunt_ohms)


class Ina2xxSource:
    """The power that a board draws through a wire with an INA2xx chip."""

    def __init__(self, read_bus: Callable[[], BusReading], wire: Wire, name: str = NAME) -> None:
        self._read_bus = read_bus
        self._wire = wire
        covers = {
            Wire.SUPPLY: "the supply line that the chip sits in",
            Wire.UPS: "what the board takes from the UPS battery; nothing while it charges",
            Wire.UNKNOWN: "what flows out of a battery; set energy.ina2xx_wire to `supply` or `ups`",
        }
        self.info = SourceInfo(
            name,
            Kind.MEASURED,
            Coverage.BOARD if wire is Wire.SUPPLY else Coverage.BATTERY,
            covers[wire],
            resolution_watts=0.005,  # one mA step of the driver at 5 V
            period_s=1.0,
        )

    def read(self, now_s: float) -> SensorReading | None:
        """Return the power now; None while a battery charges or rests. Raise `SourceError` if the chip fails."""
        bus = self._read_bus()
        if not 0 < bus.volts <= _MAX_VOLTS:
            raise SourceError(
                self.info.name, f"reads {bus.volts:g} V, outside the chip's range", "check wiring and the I2C address"
            )
        watts = bus.board_watts(self._wire)
        return None if watts is None else SensorReading(now_s, watts=plausible_watts(self.info.name, watts))

    def self_test(self, now_s: float) -> SelfTest:
        """Return whether the chip answers, and what still needs to be configured."""
        test = probe_by_reading(self, now_s)
        if test.ok and self._wire is Wire.UNKNOWN:
            return SelfTest(True, test.text, 'say which wire it sits in: energy.ina2xx_wire = "supply" or "ups"')
        return test

    def close(self) -> None:
        """Do nothing: no file stays open."""
