"""The power source, by rule and on recorded machines."""

from pathlib import Path

import pytest

from port_agent.facts.power_supply import parse_uevent, plug_monitor, read_power, supply_from_uevent
from port_agent.facts.readings import Power
from port_agent.facts.sysfs import Tree
from tests.agent.trees import LAPTOP_BATTERY, MAINS, MOUSE, recorded, supply_tree, write_tree

USB_UNUSED = "POWER_SUPPLY_NAME=ucsi\nPOWER_SUPPLY_TYPE=USB\nPOWER_SUPPLY_ONLINE=0\n"
USB_C_CHARGING = "POWER_SUPPLY_NAME=ucsi\nPOWER_SUPPLY_TYPE=USB\nPOWER_SUPPLY_USB_TYPE=C [PD]\nPOWER_SUPPLY_ONLINE=1\n"
WIRELESS = "POWER_SUPPLY_NAME=pad\nPOWER_SUPPLY_TYPE=Wireless\nPOWER_SUPPLY_ONLINE=1\n"


def battery(status: str, capacity: int = 58) -> str:
    return LAPTOP_BATTERY.format(status=status, capacity=capacity)


@pytest.mark.parametrize(
    ("supplies", "power", "level"),
    [
        ({}, Power.ASSUMED, None),
        ({"mouse": MOUSE}, Power.ASSUMED, None),
        ({"BAT0": battery("Discharging"), "ACAD": MAINS.format(online=0)}, Power.BATTERY, 58),
        ({"BAT0": battery("Charging"), "ACAD": MAINS.format(online=1)}, Power.EXTERNAL, 58),
        ({"BAT0": battery("Discharging"), "ACAD": MAINS.format(online=1)}, Power.EXTERNAL, 58),
        ({"BAT0": battery("Discharging"), "usb": USB_C_CHARGING}, Power.EXTERNAL, 58),
        ({"BAT0": battery("Discharging"), "pad": WIRELESS}, Power.EXTERNAL, 58),
        ({"BAT0": battery("Discharging"), "usb": USB_UNUSED, "mouse": MOUSE}, Power.BATTERY, 58),
        ({"BAT0": battery("Not charging"), "ACAD": MAINS.format(online=0)}, Power.EXTERNAL, 58),
        ({"BAT0": battery("Unknown"), "ACAD": MAINS.format(online=0)}, Power.UNKNOWN, 58),
        ({"usb": USB_UNUSED}, Power.ASSUMED, None),
        ({"ACAD": MAINS.format(online=1), "mouse": MOUSE}, Power.EXTERNAL, None),
    ],
)
def test_rule(tmp_path: Path, supplies: dict[str, str], power: Power, level: float | None) -> None:
    tree = Tree(sys=supply_tree(tmp_path, **supplies))
    reading = read_power(tree)
    assert (reading.power, reading.battery_percent) == (power, level)
    assert reading.detail
    assert tree.take_faults() == ()


def test_a_machine_without_the_class_is_assumed_on_mains(tmp_path: Path) -> None:
    tree = Tree(sys=tmp_path)
    assert read_power(tree).power is Power.ASSUMED
    assert tree.take_faults() == ()


def test_separate_files_stand_in_for_a_missing_uevent(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "class/power_supply/BAT1/type": "Battery\n",
            "class/power_supply/BAT1/status": "Discharging\n",
            "class/power_supply/BAT1/capacity": "12\n",
        },
    )
    reading = read_power(Tree(sys=tmp_path))
    assert (reading.power, reading.battery_percent) == (Power.BATTERY, 12)


def test_an_unreadable_supply_is_a_fault_and_not_a_guess(tmp_path: Path) -> None:
    (tmp_path / "class/power_supply/BAT0/uevent").mkdir(parents=True)
    tree = Tree(sys=tmp_path)
    assert read_power(tree).power is Power.UNKNOWN
    assert "power/BAT0" in {fault.sensor for fault in tree.take_faults()}


def test_tripwire_changes_with_the_plug(tmp_path: Path) -> None:
    tree = Tree(sys=supply_tree(tmp_path, ACAD=MAINS.format(online=1), BAT0=battery("Charging")))
    before = plug_monitor(tree)
    supply_tree(tmp_path, ACAD=MAINS.format(online=0))
    assert plug_monitor(tree) != before


@pytest.mark.parametrize(
    ("files", "power", "level"),
    [
        (("legion_go_s.ACAD.uevent", "legion_go_s.BAT0.uevent", "legion_go_s.usbc.uevent"), Power.BATTERY, 58),
        (("hid_keyboard.uevent",), Power.ASSUMED, None),
    ],
)
def test_recorded_uevents(tmp_path: Path, files: tuple[str, ...], power: Power, level: float | None) -> None:
    texts = {str(number): recorded(f"power_supply/{name}") for number, name in enumerate(files)}
    reading = read_power(Tree(sys=supply_tree(tmp_path, **texts)))
    assert (reading.power, reading.battery_percent) == (power, level)


@pytest.mark.parametrize(
    ("name", "power", "level"),
    [("axp20x_discharging", Power.BATTERY, 82), ("axp20x_full_on_mains", Power.EXTERNAL, 98)],
)
def test_recorded_small_arm_board(tmp_path: Path, name: str, power: Power, level: float) -> None:
    """The battery says ONLINE=1 even while it discharges; the recording has no TYPE line."""
    reading = read_power(Tree(sys=supply_tree(tmp_path, battery=recorded(f"power_supply/{name}.uevent"))))
    assert (reading.power, reading.battery_percent) == (power, level)


def test_recorded_gauge_that_reports_nonsense(tmp_path: Path) -> None:
    lines = recorded("power_supply/rpi_max17040.sysfs.txt").splitlines()
    pairs = (line.removeprefix("/sys/").partition(":")[::2] for line in lines if line.startswith("/sys/"))
    reading = read_power(Tree(sys=write_tree(tmp_path, dict(pairs))))
    assert (reading.power, reading.battery_percent) == (Power.UNKNOWN, None)


def test_recorded_charge_gauge_on_battery(tmp_path: Path) -> None:
    blocks: dict[str, str] = {}
    name = ""
    for line in recorded("power_supply/dell_charge_gauge.udev.txt").splitlines():
        if line.startswith("DEVPATH="):
            name = line.rpartition("/")[2]
        blocks[name] = blocks.get(name, "") + line + "\n"
    blocks["ADP0"] += "POWER_SUPPLY_TYPE=Mains\n"
    reading = read_power(Tree(sys=supply_tree(tmp_path, **blocks)))
    assert (reading.power, reading.battery_percent) == (Power.BATTERY, 92)


def test_recorded_charge_threshold_is_external_power(tmp_path: Path) -> None:
    text = recorded("power_supply/thinkpad_not_charging.tlp-stat.txt")
    files = {"class/power_supply/BAT0/type": "Battery"}
    for line in text.splitlines():
        path, separator, value = line.partition("=")
        if separator and path.startswith("/sys/"):
            files[path.strip().removeprefix("/sys/")] = value.partition("[")[0].strip()
    assert read_power(Tree(sys=write_tree(tmp_path, files))).power is Power.EXTERNAL


def test_level_word_and_repeated_keys() -> None:
    values = parse_uevent("POWER_SUPPLY_TYPE=Battery\nPOWER_SUPPLY_TYPE=Battery\nPOWER_SUPPLY_CAPACITY_LEVEL=Low\n")
    assert supply_from_uevent(values).capacity_percent == 15
    assert supply_from_uevent({"CAPACITY_LEVEL": "Unknown"}).capacity_percent is None
