"""What may be so at one moment on a machine of plain files, and what must follow: written from the policy's
words, not from its code.
"""

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import time as hour
from pathlib import Path

from port_agent.facts.idle import MIN_SAMPLE_S
from port_agent.policy.decide import TimeWindow
from tests.agent.facts.machines import stat
from tests.agent.trees import LAPTOP_BATTERY, MAINS, supply_tree, write_tree

NIGHTS = tuple(TimeWindow(day, hour(22), hour(7)) for day in range(7))
UPS = "POWER_SUPPLY_NAME=ups\nPOWER_SUPPLY_TYPE=UPS\nPOWER_SUPPLY_ONLINE={online}\n"
LAGS = {"lag 0 s": 0.0, "lag 1 s": 1.0, "lag 3 s": 3.0, "lag 8 s": 8.0, "lag for ever": float("inf")}
LOOKED_AFTER_S = (0.05, 2.0, 5.0, 30.0)
"""When it is looked, counted from the change: within, between and behind the lags."""
QUIET_S = 1_000_000


@dataclass(frozen=True)
class Row:
    """One moment; each field begins with how it is while training goes on."""

    power: str = "mains"
    battery: str = "80 %"
    ups: str = "none"
    person: str = "nobody"
    heat: str = "50 C"
    window: str = "always"
    clock: str = "set"
    pause: str = "none"
    memory: str = "plenty"


CHANGES = {
    "power": (*(f"pulled, {lag}" for lag in LAGS), "not listed", "unreadable"),
    "battery": ("20 %", "taken out"),
    "ups": ("online", "feeds"),
    "person": ("types on tty1", "moves the mouse", "computes"),
    "heat": ("80 C", "unreadable", "vanished"),
    "window": ("open", "closed"),
    "clock": ("unset",),
    "pause": ("paused",),
    "memory": ("little",),
}


def rows() -> Iterator[Row]:
    """Yield good conditions, every change alone, and every two of different kinds together."""
    yield Row()
    single = [{kind: value} for kind, values in CHANGES.items() for value in values]
    for change in single:
        yield replace(Row(), **change)
    for first, second in itertools.combinations(single, 2):
        if first.keys() != second.keys():
            yield replace(Row(), **{**first, **second})


def expected(row: Row, after_s: float) -> set[str]:
    """Return the objections that a row must have so long after it began: a load is known after half a second."""
    seen = row.person != "nobody" and (row.person != "computes" or after_s >= MIN_SAMPLE_S)
    codes: dict[str, set[str]] = {
        "person": {"in-use"} if seen else set(),
        "heat": {"80 C": {"hot"}, "unreadable": {"unreadable"}, "vanished": {"unreadable"}}.get(row.heat, set()),
        "pause": {"user"} if row.pause == "paused" else set(),
        "memory": {"memory"} if row.memory == "little" else set(),
        "power": _expected_of_power(row),
        "battery": {"low-battery"}
        if row.battery == "20 %" and row.power not in ("not listed", "unreadable")
        else set(),
        "window": set(),
    }
    if row.window != "always":
        codes["window"] = {"clock"} if row.clock == "unset" else {"window"} if row.window == "closed" else set()
    return set[str]().union(*codes.values())


def _expected_of_power(row: Row) -> set[str]:
    """Return what the supplies must lead to: an explicit no wins, a UPS that feeds before
    all, the unknown is closed.
    """
    if row.power in ("unreadable", "not listed"):
        return {"power"}
    if row.ups == "feeds":
        return {"battery"}
    if row.power == "mains" or row.ups == "online":
        return set()
    return {"power"} if row.battery == "taken out" else {"battery"}


class Machine:
    """A laptop with a keyboard, a mouse and a console."""

    def __init__(self, root: Path) -> None:
        self.root, self._idle, self._busy = root, 0, 0
        files = {"sys/class/thermal/thermal_zone0/type": "cpu", "dev/tty1": "", "dev/pts/0": ""}
        mouse = "sys/devices/usb1/1-1"
        files |= {f"{mouse}/urbnum": "5", f"{mouse}/input/name": "Mouse", f"{mouse}/input/capabilities/ev": "17"}
        files |= {f"{mouse}/input/event0/dev": "13:64", "proc/pressure/memory": "some avg10=0.00"}
        write_tree(root, files)
        (root / f"{mouse}/input/event0/device").symlink_to(root / f"{mouse}/input")
        (root / "sys/class/input").mkdir(parents=True)
        (root / "sys/class/input/event0").symlink_to(root / f"{mouse}/input/event0")
        for name in ("tty1", "pts/0"):
            self._stamp(root / "dev" / name, int(time.time()) - QUIET_S)
        self.show(Row(), 0.0)

    def show(self, row: Row, since_s: float) -> None:
        """Make the files those of a row that began so long ago."""
        self._supplies(row, since_s)
        self._thermometer(row.heat)
        free_kb = 10 * 1024 if row.memory == "little" else 900 * 1024
        write_tree(self.root / "proc", {"meminfo": f"MemTotal: 2000000 kB\nMemAvailable: {free_kb} kB\n"})
        self.run_processors(900 if row.person == "computes" else 10)
        if row.person == "types on tty1":
            self._stamp(self.root / "dev/tty1", int(time.time()))
        if row.person == "moves the mouse":
            write_tree(self.root, {"sys/devices/usb1/1-1/urbnum": "6"})

    def run_processors(self, busy: int) -> None:
        """Let this number of busy ticks pass, and then 1000 idle ones."""
        self._idle += 1000
        self._busy += busy
        write_tree(self.root / "proc", {"stat": stat(self._busy, self._idle)})

    def _stamp(self, path: Path, at_s: int) -> None:
        os.utime(path, (at_s, at_s))

    def _supplies(self, row: Row, since_s: float) -> None:
        folder = self.root / "sys/class/power_supply"
        if row.power == "not listed":
            folder.rename(folder.with_name("gone"))
            return
        if row.power == "unreadable":
            folder.rename(folder.with_name("gone"))
            folder.symlink_to(folder.name)
            return
        pulled = row.power.startswith("pulled, ")
        drained = pulled and since_s >= LAGS[row.power.removeprefix("pulled, ")]
        level = "20" if row.battery == "20 %" else "80"
        status = "Discharging" if drained else "Charging"
        supply_tree(self.root / "sys", ACAD=MAINS.format(online=int(not pulled)))
        if row.battery == "taken out":
            for file in (folder / "BAT0").glob("*"):
                file.unlink()
            if (folder / "BAT0").is_dir():
                (folder / "BAT0").rmdir()
        else:
            supply_tree(self.root / "sys", BAT0=LAPTOP_BATTERY.format(status=status, capacity=level))
        if row.ups != "none":
            supply_tree(self.root / "sys", ups=UPS.format(online=int(row.ups == "online")))

    def _thermometer(self, heat: str) -> None:
        file = self.root / "sys/class/thermal/thermal_zone0/temp"
        if heat == "vanished":
            file.unlink(missing_ok=True)
        else:
            write_tree(file.parent, {"temp": {"50 C": "50000", "80 C": "80000"}.get(heat, "warm")})


def line(row: Row, codes: set[str]) -> str:
    """Return a row of the printed table."""
    return " | ".join(
        [*(f"{getattr(row, field.name):18}" for field in fields(row)), ", ".join(sorted(codes)) or "trains"]
    )
