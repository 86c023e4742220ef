"""Battery gauges: each style, each trap, damage."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from port_agent.energy.sources.battery import BatterySource, Style, parse_gauge
from port_agent.energy.sources.power_source import SourceAbsent, SourceError
from tests.agent.energy.device_trees import supply
from tests.agent.energy.recordings import local

LEGION = local("legion_go_s.BAT0.uevent")
AXP = local("axp20x_discharging.uevent")
DELL = (
    "POWER_SUPPLY_NAME=BAT0\nPOWER_SUPPLY_STATUS=Discharging\nPOWER_SUPPLY_PRESENT=1\n"
    "POWER_SUPPLY_VOLTAGE_NOW=11712000\nPOWER_SUPPLY_CURRENT_NOW=1621000\nPOWER_SUPPLY_CHARGE_FULL=694000\n"
    "POWER_SUPPLY_CHARGE_NOW=642000\nPOWER_SUPPLY_CAPACITY=92\n"
)


@pytest.mark.parametrize(
    ("text", "style", "watts"),
    [
        (LEGION, Style.POWER, 22.543),
        (AXP, Style.CURRENT, 3.862 * 0.523),
        (DELL, Style.CURRENT, 11.712 * 1.621),
        (DELL.replace("CURRENT_NOW=1621000", "CURRENT_NOW=-1621000"), Style.CURRENT, 11.712 * 1.621),
    ],
)
def test_styles(text: str, style: Style, watts: float) -> None:
    gauge = parse_gauge(text)
    assert (gauge.style, gauge.watts, gauge.discharging) == (style, pytest.approx(watts), True)


def test_level_styles_count_the_fall(tmp_path: Path) -> None:
    text = re.sub(r"POWER_SUPPLY_POWER_NOW=\d+\n", "", LEGION)
    file = supply(tmp_path, "BAT0", text)
    source = BatterySource(tmp_path)
    first = source.read(0.0)
    file.write_text(text.replace("ENERGY_NOW=32350000", "ENERGY_NOW=32340000"))
    second = source.read(30.0)
    assert first is not None and first.counter_joules == 0
    assert second is not None and second.counter_joules == pytest.approx(36.0)  # 10 mWh
    charge = re.sub(r"POWER_SUPPLY_CURRENT_NOW=\d+\n", "", DELL)
    gauge = parse_gauge(charge)
    assert (gauge.style, gauge.level_joules) == (Style.CHARGE, pytest.approx(0.642 * 3600 * 11.712))


def test_online_battery_that_discharges_is_measured(tmp_path: Path) -> None:
    assert "ONLINE=1" in AXP
    supply(tmp_path, "axp20x-battery", AXP)
    reading = BatterySource(tmp_path).read(0.0)
    assert reading is not None and reading.watts == pytest.approx(2.019826)


def test_not_charging_is_not_discharging(tmp_path: Path) -> None:
    supply(tmp_path, "axp20x-battery", local("axp20x_full_on_mains.uevent"))
    assert BatterySource(tmp_path).read(0.0) is None


def test_online_mains_means_nothing_to_measure(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", LEGION)
    adapter = supply(tmp_path, "ACAD", local("legion_go_s.ACAD.uevent"))
    source = BatterySource(tmp_path)
    assert source.read(0.0) is not None
    adapter.write_text(local("legion_go_s.ACAD.uevent").replace("ONLINE=0", "ONLINE=1"))
    assert source.read(1.0) is None


def test_peripheral_batteries_do_not_count(tmp_path: Path) -> None:
    supply(tmp_path, "hidpp_battery_0", local("hid_keyboard.uevent"))
    supply(tmp_path, "mouse", AXP.replace("PRESENT=1", "SCOPE=Device"))
    with pytest.raises(SourceAbsent):
        BatterySource(tmp_path)


def test_absurd_voltage_is_refused() -> None:
    with pytest.raises(SourceError, match=r"0\.054 V, which no battery has"):
        parse_gauge(AXP.replace("VOLTAGE_NOW=3862000", "VOLTAGE_NOW=53744"))


def test_gauge_without_any_figure(tmp_path: Path) -> None:
    supply(
        tmp_path, "battery", "POWER_SUPPLY_NAME=battery\nPOWER_SUPPLY_CAPACITY=101\nPOWER_SUPPLY_VOLTAGE_NOW=53744\n"
    )
    with pytest.raises(SourceAbsent):
        BatterySource(tmp_path)


@pytest.mark.parametrize("text", [LEGION, AXP, DELL])
def test_cut_anywhere_is_never_a_wrong_number(text: str) -> None:
    whole = parse_gauge(text)
    for end in range(len(text)):
        cut = text[:end]
        if not cut.endswith("\n"):
            with pytest.raises(SourceError):
                parse_gauge(cut, whole.style)
            continue
        try:
            gauge = parse_gauge(cut, whole.style)
        except SourceError:
            continue
        assert gauge.watts == whole.watts


@pytest.mark.parametrize("value", ["", "x", "22 543", "0x10", "1e6", "22543000.0", "9" * 22])
def test_garbled_figure_is_never_a_number(tmp_path: Path, value: str) -> None:
    file = supply(tmp_path, "BAT0", LEGION)
    source = BatterySource(tmp_path)
    file.write_text(LEGION.replace("POWER_NOW=22543000", f"POWER_NOW={value}"))
    with pytest.raises(SourceError):
        source.read(0.0)
    file.unlink()
    with pytest.raises(SourceError, match="cannot read"):
        source.read(1.0)


def test_recorded_gauges(shared: Callable[[str], str], tmp_path: Path) -> None:
    assert parse_gauge(shared("power_supply/legion_go_s.BAT0.uevent")).watts == pytest.approx(22.543)
    udev = shared("power_supply/dell_charge_gauge.udev.txt")
    battery = udev[udev.index("POWER_SUPPLY_NAME=BAT0") :]
    assert parse_gauge(battery).watts == pytest.approx(18.985152)
    supply(tmp_path, "usbc", shared("power_supply/legion_go_s.usbc.uevent"))
    supply(tmp_path, "keyboard", shared("power_supply/hid_keyboard.uevent"))
    with pytest.raises(SourceAbsent):
        BatterySource(tmp_path)


def test_recorded_thinkpad_held_by_its_threshold(shared: Callable[[str], str], tmp_path: Path) -> None:
    text = shared("power_supply/thinkpad_not_charging.tlp-stat.txt")
    values = dict(re.findall(r"/BAT0/(\w+) += +(\S.*?)(?: \[\w+\])?$", text, re.MULTILINE))
    assert values["status"] == "Not charging"
    lines = [f"POWER_SUPPLY_{key.upper()}={value}" for key, value in values.items() if "control" not in key]
    uevent = "\n".join(["POWER_SUPPLY_TYPE=Battery", *lines]) + "\n"
    assert parse_gauge(uevent).watts == 0  # the gauge says zero, which is not what the machine draws
    supply(tmp_path, "BAT0", uevent)
    assert BatterySource(tmp_path).read(0.0) is None


def test_recorded_pi_fuel_gauge(shared: Callable[[str], str], tmp_path: Path) -> None:
    text = shared("power_supply/rpi_max17040.sysfs.txt")
    values = dict(re.findall(r"/battery/(\w+):(\w+)$", text, re.MULTILINE))
    assert values["capacity"] == "101"
    supply(tmp_path, "battery", "".join(f"POWER_SUPPLY_{key.upper()}={value}\n" for key, value in values.items()))
    with pytest.raises(SourceAbsent):
        BatterySource(tmp_path)
