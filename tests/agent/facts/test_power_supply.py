"""The power source, by rule and on recorded machines."""

from pathlib import Path

import pytest

from port_agent.facts.power_supply import CHARGED_S, PowerSensor, parse_uevent, plug_monitor, supply_from_uevent
from port_agent.facts.readings import Answer, Power, PowerReading
from port_agent.facts.sysfs import Tree
from tests.agent.trees import LAPTOP_BATTERY, MAINS, MOUSE, recorded, supply_tree, write_tree

USB_UNUSED = "POWER_SUPPLY_NAME=ucsi\nPOWER_SUPPLY_TYPE=USB\nPOWER_SUPPLY_ONLINE=0\n"
USB_C_CHARGING = "POWER_SUPPLY_NAME=ucsi\nPOWER_SUPPLY_TYPE=USB\nPOWER_SUPPLY_USB_TYPE=C [PD]\nPOWER_SUPPLY_ONLINE=1\n"
WIRELESS = "POWER_SUPPLY_NAME=pad\nPOWER_SUPPLY_TYPE=Wireless\nPOWER_SUPPLY_ONLINE=1\n"


UPS = "POWER_SUPPLY_NAME=ups\nPOWER_SUPPLY_TYPE=UPS\nPOWER_SUPPLY_ONLINE={online}\n"
UPS_GAUGE = "POWER_SUPPLY_NAME=ups\nPOWER_SUPPLY_TYPE=UPS\nPOWER_SUPPLY_STATUS=Discharging\nPOWER_SUPPLY_CAPACITY=77\n"
UNPLUGGED = MAINS.format(online=0)


def battery(status: str, capacity: int = 58) -> str:
    return LAPTOP_BATTERY.format(status=status, capacity=capacity)


def read_power(tree: Tree) -> PowerReading:
    return PowerSensor().read(tree, 0.0)


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
        ({"BAT0": battery("Discharging"), "ACAD": UNPLUGGED, "usb": USB_C_CHARGING}, Power.BATTERY, 58),
        ({"BAT0": battery("Charging"), "ACAD": UNPLUGGED, "usb": USB_C_CHARGING}, Power.EXTERNAL, 58),
        ({"BAT0": battery("Discharging"), "ACAD": MAINS.format(online=1), "usb": USB_UNUSED}, Power.EXTERNAL, 58),
        ({"BAT0": battery("Discharging"), "ACAD": UNPLUGGED, "pad": WIRELESS}, Power.EXTERNAL, 58),
        ({"BAT0": battery("Charging"), "ACAD": UNPLUGGED}, Power.BATTERY, 58),
        ({"BAT0": battery("Full", 100), "ACAD": UNPLUGGED}, Power.BATTERY, 100),
        ({"BAT0": battery("Not charging"), "ACAD": UNPLUGGED}, Power.BATTERY, 58),
        ({"BAT0": battery("Not charging"), "usb": USB_UNUSED}, Power.BATTERY, 58),
        ({"BAT0": battery("Charging")}, Power.EXTERNAL, 58),
        ({"BAT0": battery("Unknown"), "ACAD": UNPLUGGED}, Power.BATTERY, 58),
        ({"BAT0": battery("Unknown")}, Power.UNKNOWN, 58),
        ({"ACAD": UNPLUGGED}, Power.UNKNOWN, None),
        ({"ups": UPS.format(online=1)}, Power.EXTERNAL, None),
        ({"ups": UPS.format(online=0)}, Power.BATTERY, None),
        ({"ups": UPS.format(online=0), "ACAD": MAINS.format(online=1)}, Power.BATTERY, None),
        ({"ups": UPS_GAUGE, "ACAD": MAINS.format(online=1), "BAT0": battery("Full", 100)}, Power.BATTERY, 77),
        ({"hid-ups-1": UPS_GAUGE.replace("NAME=ups", "NAME=hid-ups-1")}, Power.BATTERY, 77),
        ({"BAT0": battery("Full", 99), "BAT1": battery("Discharging", 40)}, Power.BATTERY, 40),
        ({"BAT0": battery("Unknown", 3), "BAT1": battery("Discharging", 90), "ACAD": UNPLUGGED}, Power.BATTERY, 90),
        (
            {"BAT0": battery("Unknown", 3), "BAT1": battery("Full", 99), "ACAD": MAINS.format(online=1)},
            Power.EXTERNAL,
            99,
        ),
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
    (tmp_path / "class/net").mkdir(parents=True)
    tree = Tree(sys=tmp_path)
    assert read_power(tree).power is Power.ASSUMED
    assert tree.take_faults() == ()


@pytest.mark.parametrize("folder", ["", "class"])
def test_where_the_kernel_shows_nothing_no_plug_is_assumed(tmp_path: Path, folder: str) -> None:
    """/sys is not mounted, or `sensors.sysfs_root` names another directory."""
    (tmp_path / folder).mkdir(exist_ok=True)
    tree = Tree(sys=tmp_path)
    assert read_power(tree).power is Power.UNKNOWN
    assert "is sysfs mounted there?" in str(tree.take_faults())


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


def test_a_class_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    tree = Tree(sys=tmp_path)
    (tmp_path / "class").mkdir()
    (tmp_path / "class/power_supply").symlink_to("power_supply")  # ELOOP, for root too
    assert read_power(tree).power is Power.UNKNOWN
    assert [fault.sensor for fault in tree.take_faults()] == ["power"]


def test_a_plug_that_cannot_be_read_is_no_plug(tmp_path: Path) -> None:
    supply_tree(tmp_path, BAT0=battery("Charging"))
    (tmp_path / "class/power_supply/ACAD/uevent").mkdir(parents=True)
    assert read_power(Tree(sys=tmp_path)).power is Power.UNKNOWN


class Machine:
    """A laptop whose supplies a test sets, read by one sensor."""

    def __init__(self, root: Path) -> None:
        self.root, self.sensor, self.now_s = root, PowerSensor(), 0.0

    def power(self, after_s: float = 1.0, **supplies: str) -> Power:
        self.now_s += after_s
        return self.sensor.read(Tree(sys=supply_tree(self.root, **supplies)), self.now_s).power


@pytest.mark.parametrize("lag_s", [0, 1, 3, 8, 86400])
@pytest.mark.parametrize("status", ["Charging", "Full", "Not charging"])
def test_a_status_that_lags_behind_the_plug_never_trains(tmp_path: Path, lag_s: int, status: str) -> None:
    laptop, level = Machine(tmp_path), 80
    assert laptop.power(ACAD=MAINS.format(online=1), BAT0=battery(status, level)) is Power.EXTERNAL
    for second in (0.0, 0.1, 1, 2, 3, 5, 8, 60, 120, 600, 3600, 7200):
        said = status if second < lag_s else "Discharging"
        level = 80 - int(second // 600)
        assert laptop.power(1.0, ACAD=UNPLUGGED, BAT0=battery(said, level)) is Power.BATTERY, (second, said)


def test_a_charger_that_no_supply_shows_counts_once_the_level_has_risen(tmp_path: Path) -> None:
    laptop = Machine(tmp_path)
    assert laptop.power(ACAD=UNPLUGGED, BAT0=battery("Charging", 50)) is Power.BATTERY
    assert laptop.power(10, BAT0=battery("Charging", 51)) is Power.BATTERY  # a gauge jumps, too
    assert laptop.power(CHARGED_S, BAT0=battery("Charging", 51)) is Power.EXTERNAL
    assert laptop.power(BAT0=battery("Full", 52)) is Power.EXTERNAL
    assert laptop.power(BAT0=battery("Full", 51)) is Power.BATTERY  # it falls: pulled, and the status lags
    assert laptop.power(BAT0=battery("Discharging", 50)) is Power.BATTERY


def test_a_battery_that_is_taken_out(tmp_path: Path) -> None:
    laptop = Machine(tmp_path)
    assert laptop.power(ACAD=UNPLUGGED, BAT0=battery("Discharging")) is Power.BATTERY
    (tmp_path / "class/power_supply/BAT0/uevent").unlink()
    (tmp_path / "class/power_supply/BAT0").rmdir()
    assert laptop.power() is Power.UNKNOWN  # nothing feeds it that is listed: rather a driver that vanished
    assert laptop.power(ACAD=MAINS.format(online=1)) is Power.EXTERNAL
    assert laptop.sensor.read(Tree(sys=tmp_path), 99.0).battery is Answer.NO


def test_a_ups_board_by_its_current(tmp_path: Path) -> None:
    amperes: list[float | OSError] = [0.4]

    def read() -> float:
        newest = amperes[-1]
        if isinstance(newest, OSError):
            raise newest
        return newest

    sensor, tree = PowerSensor(read), Tree(sys=supply_tree(tmp_path))
    assert sensor.read(tree, 0.0).power is Power.EXTERNAL
    before = sensor.feeding(tree)
    amperes.append(-0.3)
    assert sensor.feeding(tree) != before
    assert sensor.read(tree, 1.0).power is Power.BATTERY
    amperes.append(OSError("no answer from /dev/i2c-1"))
    assert sensor.read(tree, 2.0).power is Power.UNKNOWN
    assert [fault.sensor for fault in tree.take_faults()] == ["power/ups"]


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
