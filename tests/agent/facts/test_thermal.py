"""Temperatures and throttling, from zones, chips and vcgencmd."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from port_agent.facts import Answer
from port_agent.facts.sysfs import Tree
from port_agent.facts.thermal import SENSOR, TemperatureSensor, parse_throttled, read_throttled
from tests.agent.trees import recorded, write_tree


def read_temperature(tree: Tree) -> float | None:
    return TemperatureSensor().read(tree)


def test_temperature_ignores_dead_and_foreign_zones(tmp_path: Path) -> None:
    zones = {"cpu-thermal": 48312, "iwlwifi_1": 90000, "GPU-therm": -256000, "PMIC-Die": 100000, "soc": 51200}
    for number, (kind, value) in enumerate(zones.items()):
        zone = f"class/thermal/thermal_zone{number}"
        write_tree(tmp_path, {f"{zone}/type": kind, f"{zone}/temp": str(value)})
    assert read_temperature(Tree(sys=tmp_path)) == pytest.approx(51.2)


def test_the_processors_own_thermometer_counts_beside_a_firmwares_constant(tmp_path: Path) -> None:
    zone = "class/thermal/thermal_zone0"
    tree = Tree(sys=write_tree(tmp_path, {f"{zone}/type": "acpitz", f"{zone}/temp": "16800"}))
    assert read_temperature(tree) == 16.8
    write_tree(tmp_path / "class/hwmon/hwmon2", {"name": "k10temp", "temp1_input": "91000"})
    assert read_temperature(tree) == 91.0


def test_temperature_of_hwmon(tmp_path: Path) -> None:
    files = {"hwmon0/name": "coretemp", "hwmon0/temp1_input": "61000", "hwmon0/temp2_input": "59000"}
    files |= {"hwmon1/name": "nvme", "hwmon1/temp1_input": "80000"}
    write_tree(tmp_path / "class/hwmon", files)
    assert read_temperature(Tree(sys=tmp_path)) == pytest.approx(61.0)


def test_a_core_that_is_switched_off_takes_its_thermometer_with_it(tmp_path: Path) -> None:
    files = {"name": "coretemp", "temp1_input": "61000", "temp2_input": "59000"}
    sensor, tree = TemperatureSensor(), Tree(sys=tmp_path)
    write_tree(tmp_path / "class/hwmon/hwmon0", files)
    assert sensor.read(tree) == 61.0
    (tmp_path / "class/hwmon/hwmon0/temp2_input").unlink()
    assert sensor.read(tree) == 61.0 and tree.take_faults() == ()
    (tmp_path / "class/hwmon/hwmon0/temp1_input").unlink()
    assert sensor.read(tree) is None
    assert SENSOR in {fault.sensor for fault in tree.take_faults()}


def test_nonsense_in_a_zone_is_a_fault(tmp_path: Path) -> None:
    zone = "class/thermal/thermal_zone0"
    tree = Tree(sys=write_tree(tmp_path, {f"{zone}/type": "cpu", f"{zone}/temp": "warm"}))
    assert read_temperature(tree) is None
    assert "expected a number" in tree.take_faults()[0].reason


def test_a_thermometer_is_missed_only_where_it_gave_a_value(tmp_path: Path) -> None:
    zone = "class/thermal/thermal_zone"
    files = {f"{zone}0/temp": "50000", f"{zone}1/temp": "40000", f"{zone}2/temp": "never"}
    sensor, tree = TemperatureSensor(), Tree(sys=write_tree(tmp_path, files))
    assert sensor.read(tree) == 50.0
    assert [fault.sensor for fault in tree.take_faults()] == ["temperature/thermal_zone2"]
    (tmp_path / f"{zone}0/temp").unlink()
    assert sensor.read(tree) == 40.0
    assert SENSOR in {fault.sensor for fault in tree.take_faults()}
    write_tree(tmp_path, {f"{zone}0/temp": "-256000"})  # switched off
    assert sensor.read(tree) == 40.0
    assert SENSOR not in {fault.sensor for fault in tree.take_faults()}


@pytest.mark.parametrize(
    ("text", "now", "since_boot", "detail"),
    [
        ("throttled=0x0", Answer.NO, Answer.NO, ""),
        ("throttled=0x50000", Answer.NO, Answer.YES, ""),
        ("throttled=0x50005", Answer.YES, Answer.YES, "under-voltage, throttled"),
        ("50008", Answer.YES, Answer.YES, "soft temperature limit"),
    ],
)
def test_throttled_bits(text: str, now: Answer, since_boot: Answer, detail: str) -> None:
    reading = parse_throttled(text)
    assert reading is not None
    assert (reading.now, reading.since_boot, reading.detail) == (now, since_boot, detail)


@pytest.mark.parametrize(
    "text",
    [
        "VCHI initialization failed",
        "Can't open device file: /dev/vcio",
        'error=1 error_msg="bad"',
        "0x50005 feed",
        "throttled=",
    ],
)
def test_what_vcgencmd_says_of_its_own_trouble_is_no_state(text: str) -> None:
    """Some of these end in letters that are hexadecimal digits, too."""
    assert parse_throttled(text) is None


@pytest.mark.parametrize("bus", ["soc/soc:firmware", "soc@107c000000/soc@107c000000:firmware"])
def test_the_firmwares_file_is_found_on_a_pi_4_and_a_pi_5(bus: str, tmp_path: Path) -> None:
    tree = Tree(sys=write_tree(tmp_path, {f"devices/platform/{bus}/get_throttled": "50005\n"}))
    reading = read_throttled(tree)
    assert reading is not None and reading.now is Answer.YES and not tree.faults
    write_tree(tmp_path, {f"devices/platform/{bus}/get_throttled": "no\n"})
    assert read_throttled(tree) is None and tree.faults


def test_a_zone_that_an_orin_lacks_or_has_switched_off_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zones = {"cpu-thermal": 48312, "cv0-thermal": 0}
    for number, (kind, value) in enumerate(zones.items()):
        zone = f"class/thermal/thermal_zone{number}"
        write_tree(tmp_path, {f"{zone}/type": kind, f"{zone}/temp": str(value)})
    asked, error = Tree.ask, errno.EAGAIN

    def ask(tree: Tree, path: Path, read: Callable[[], object]) -> object:
        if path.parent.name == "thermal_zone1" and path.name == "temp":
            raise OSError(error, os.strerror(error))
        return asked(tree, path, read)

    monkeypatch.setattr(Tree, "ask", ask)
    tree = Tree(sys=tmp_path)
    assert read_temperature(tree) == 48.312 and not tree.faults
    error = errno.EIO
    assert read_temperature(tree) == 48.312 and tree.faults


def test_recorded_vcgencmd() -> None:
    lines = recorded("rpi/vcgencmd_samples.txt").splitlines()
    readings = [parse_throttled(line) for line in lines if line.startswith("throttled=")]
    assert [reading.now for reading in readings if reading] == [Answer.NO, Answer.YES, Answer.NO]
