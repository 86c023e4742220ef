"""INA219 family: the sign tells charging from feeding, the wire tells what it means."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from port_agent.energy.sources.ina2xx import (
    BusReading,
    Ina2xxSource,
    Wire,
    decode_registers,
    find_hwmon,
    read_hwmon,
    read_i2c,
)
from port_agent.energy.sources.power_source import SourceError


def hwmon(root: Path, millivolts: str = "4228", milliamperes: str = "-40", name: str = "ina219") -> Path:
    """Write the recorded INA219 of a UPS HAT on battery (networkupstools/nut issue #2960)."""
    folder = root / "sys/class/hwmon/hwmon2"
    folder.mkdir(parents=True)
    for file, value in {
        "name": name,
        "in0_input": "-4",
        "in1_input": millivolts,
        "power1_input": "176000",
        "curr1_input": milliamperes,
        "shunt_resistor": "100000",
    }.items():
        (folder / file).write_text(f"{value}\n")
    return folder


def source(folder: Path, wire: Wire) -> Ina2xxSource:
    """Return a source on the chip in `folder`."""
    return Ina2xxSource(lambda: read_hwmon(folder), wire)


def test_battery_that_feeds_the_board(tmp_path: Path) -> None:
    folder = hwmon(tmp_path)
    assert find_hwmon(tmp_path) == folder
    assert read_hwmon(folder) == BusReading(4.228, -0.040)
    for wire in Wire:
        reading = source(folder, wire).read(0.0)
        assert reading is not None and reading.watts == pytest.approx(0.16912)


def test_the_input_of_a_thor_has_more_volts_than_a_hat(tmp_path: Path) -> None:
    folder = hwmon(tmp_path, milliamperes="2500")
    (folder / "name").write_text("ina238\n")
    (folder / "in1_input").write_text("48000\n")
    assert find_hwmon(tmp_path) == folder
    reading = source(folder, Wire.SUPPLY).read(0.0)
    assert reading is not None and reading.watts == 120.0


def test_charging_current_is_no_consumption(tmp_path: Path) -> None:
    folder = hwmon(tmp_path, milliamperes="1200")
    assert source(folder, Wire.UPS).read(0.0) is None
    assert source(folder, Wire.UNKNOWN).read(0.0) is None
    supply = source(folder, Wire.SUPPLY).read(0.0)
    assert supply is not None and supply.watts == pytest.approx(5.0736)


def test_unknown_wire_asks_to_be_told(tmp_path: Path) -> None:
    assert "ina2xx_wire" in source(hwmon(tmp_path), Wire.UNKNOWN).self_test(0.0).remedy


@pytest.mark.parametrize("name", ["in1_input", "curr1_input"])
@pytest.mark.parametrize("text", ["", "42", "4 28\n", "4228 mV\n", "--4\n", "4.2\n"])
def test_torn_file_is_never_a_number(tmp_path: Path, name: str, text: str) -> None:
    folder = hwmon(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(SourceError):
        source(folder, Wire.SUPPLY).read(0.0)


@pytest.mark.parametrize("millivolts", ["0", "-5", "99999"])
def test_impossible_voltage(tmp_path: Path, millivolts: str) -> None:
    with pytest.raises(SourceError, match="outside the chip's range"):
        source(hwmon(tmp_path, millivolts=millivolts), Wire.SUPPLY).read(0.0)


def test_other_chips_are_left_alone(tmp_path: Path) -> None:
    hwmon(tmp_path, name="ina3221")
    assert find_hwmon(tmp_path) is None


def test_raw_registers() -> None:
    # -4 mV over 0.1 Ohm in steps of 10 uV; 4.228 V in steps of 4 mV, conversion-ready bit set
    reading = decode_registers(0x10000 - 400, (1057 << 3) | 2, 0.1)
    assert (reading.volts, reading.amperes) == (pytest.approx(4.228), pytest.approx(-0.04))
    with pytest.raises(SourceError, match="beyond its range"):
        decode_registers(100, (1057 << 3) | 3, 0.1)


def test_bus_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no answer from"):
        read_i2c(tmp_path / "i2c-1", 0x42, 0.1)


def test_recorded_values(shared: Callable[[str], str], tmp_path: Path) -> None:
    text = shared("rpi/vcgencmd_samples.txt")
    match = re.search(r"INA219 UPS HAT on battery\n(-?\d+)\n(-?\d+)\n(\d+)\n(-?\d+)\n(\d+)\n", text)
    assert match
    shunt_mv, bus_mv, power_uw, current_ma, shunt_uohm = map(int, match.groups())
    assert current_ma == shunt_mv * 1_000_000 / shunt_uohm
    reading = source(hwmon(tmp_path, str(bus_mv), str(current_ma)), Wire.UPS).read(0.0)
    assert reading is not None and reading.watts == pytest.approx(power_uw / 1e6, rel=0.05)  # its register rounds up
