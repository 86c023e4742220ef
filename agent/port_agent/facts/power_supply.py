"""The source of power, from Linux's power_supply class.

The rule avoids the mistakes of other programs (peripheral batteries, hard-coded adapter names, USB-C, a status that
lags). Supplies of scope Device are skipped. A UPS that is offline or discharges is battery power, whatever the supplies
behind it report. Any other online Mains, USB, Wireless or UPS supply is external power. The exception is a USB port
beside offline mains while a battery discharges. If a supply is offline, a battery that still reports Charging counts as
discharging until its level has risen for a while. Such a battery may have a second, unlisted charger (USB-C alongside a
barrel jack). A battery alone is battery power; an empty list is "assumed external"; everything else is unknown.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from port_agent.facts.readings import Answer, Power, PowerReading
from port_agent.facts.sysfs import Tree

_PERIPHERAL_PREFIXES = ("hid-", "hidpp_", "sony_controller", "wacom_", "ps-controller")
"""Drivers of mice, keyboards, pens and pads; old kernels do not set SCOPE for all of them."""

_ONLINE = {"0": Answer.NO, "1": Answer.YES, "2": Answer.YES}
"""Values of `online` that mean yes; 2 is a supply whose voltage is set by a program."""

_HELD = ("charging", "full", "not charging")
"""Status values of a battery that is not discharging."""

CHARGED_PERCENT, CHARGED_S = 1.0, 60.0
"""Rise of the level (percent) and its duration (s) that together prove a charger which no supply reports."""

UPS_REST_AMPERES = 0.02
"""Current in amperes below which a UPS battery counts as resting: a resting one shows some mA, and
the smallest board draws 50.
"""

_UPS_BOARD = Path("ups")
"""Name of the UPS's chip for questions to a device tree; it has no file there."""

_LEVELS = {"full": 100.0, "high": 80.0, "normal": 50.0, "low": 15.0, "critical": 3.0}
"""Approximate percent for gauges that only give a capacity level word."""


@dataclass(frozen=True, slots=True)
class Supply:
    """One entry of /sys/class/power_supply, as far as it could be read."""

    name: str
    kind: str
    online: Answer
    status: str
    capacity_percent: float | None
    peripheral: bool
    present: bool = True

    @property
    def is_source(self) -> bool:
        """Whether this is a plug rather than a battery."""
        return self.kind in ("mains", "wireless", "ups") or self.kind.startswith("usb")

    @property
    def is_battery(self) -> bool:
        """Whether this holds a charge; a UPS that names its status does."""
        return self.kind == "battery" or (self.kind == "ups" and bool(self.status))


def supply_from_uevent(values: Mapping[str, str]) -> Supply:
    """Return the supply that uevent lines (without `POWER_SUPPLY_`) describe."""
    name = values.get("NAME", "")
    kind = values.get("TYPE", "").lower() or ("battery" if "STATUS" in values else "")
    online = _ONLINE.get(values.get("ONLINE", ""), Answer.UNKNOWN)
    return Supply(
        name=name,
        kind=kind,
        online=online,
        status=values.get("STATUS", "").lower(),
        capacity_percent=_capacity(values),
        peripheral=values.get("SCOPE", "").lower() == "device"
        or (kind == "battery" and name.startswith(_PERIPHERAL_PREFIXES)),
        present=values.get("PRESENT", "1") != "0",
    )


def parse_uevent(text: str) -> dict[str, str]:
    """Return `POWER_SUPPLY_X=y` lines as {"X": "y"}; a repeated key keeps its last value."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {
        key.removeprefix("POWER_SUPPLY_"): value.strip() for key, _, value in pairs if key.startswith("POWER_SUPPLY_")
    }


class ChargeMonitor:
    """Finds batteries that charge although every supply is offline, by their rising level.

    Their status proves nothing: it lags by seconds on most laptops, and forever on some.
    """

    def __init__(self) -> None:
        self._begun: dict[str, tuple[float, float, float]] = {}
        """For each name: the time since which the supplies are offline (monotonic s), and the lowest and highest
        level since then, in percent.
        """

    def look(self, supplies: Sequence[Supply], now_s: float) -> frozenset[str]:
        """Add a reading; return the names of the batteries whose level has risen without a supply."""
        offline = _offline(supplies) and not _online(supplies)
        seen, rising = {}, set()
        for battery in supplies:
            level = battery.capacity_percent
            if not (offline and battery.is_battery and battery.status in _HELD) or level is None:
                continue
            since_s, lowest, highest = self._begun.get(battery.name, (now_s, level, level))
            if level < highest:
                since_s, lowest, highest = now_s, level, level
            highest = max(highest, level)
            seen[battery.name] = (since_s, lowest, highest)
            if highest - lowest >= CHARGED_PERCENT and now_s - since_s >= CHARGED_S:
                rising.add(battery.name)
        self._begun = seen
        return frozenset(rising)


def judge(
    supplies: Sequence[Supply],
    charged: Collection[str] = (),
    unread: Collection[str] = (),
    *,
    had_battery: bool = False,
) -> PowerReading:
    """Return the power source that the list of all supplies implies.

    `charged`: batteries that charge according to a `ChargeMonitor`; `unread`: supplies that exist but cannot be read;
    `had_battery`: whether there was a battery before.
    """
    ours = [supply for supply in supplies if not supply.peripheral]
    batteries = [supply for supply in ours if supply.is_battery and supply.present]
    level, battery = _level(batteries), _present(batteries, unread)

    def reading(power: Power, detail: str) -> PowerReading:
        return PowerReading(power, level, detail, battery)

    feeding = [supply.name for supply in ours if supply.kind == "ups" and supply.present and _feeds(supply)]
    if feeding:
        return reading(Power.BATTERY, f"{', '.join(feeding)} feeds this machine")
    plugged = _online(ours)
    draining = [supply.name for supply in batteries if supply.status == "discharging"]
    if plugged and not (draining and _only_ports(ours)):
        return reading(Power.EXTERNAL, f"{', '.join(plugged)} online")
    if draining:
        beside = f", though {', '.join(plugged)} says online" if plugged else ""
        return reading(Power.BATTERY, f"{', '.join(draining)} discharging{beside}")
    if unread:
        return reading(Power.UNKNOWN, f"{', '.join(unread)} cannot be read")
    offline, held = _offline(ours), [supply for supply in batteries if supply.status in _HELD]
    if not batteries:
        return reading(*_without_battery(ours, offline, had_battery=had_battery))
    if held and not offline:
        return reading(Power.EXTERNAL, f"{held[0].name} is {held[0].status}")
    risen = [supply.name for supply in held if supply.name in charged]
    if risen:
        return reading(Power.EXTERNAL, f"{', '.join(risen)} is being charged, though {', '.join(offline)} says offline")
    if offline:
        beside = f" ({held[0].name} still says {held[0].status})" if held else ""
        return reading(Power.BATTERY, f"{', '.join(offline)} offline{beside}")
    return reading(Power.UNKNOWN, _contradiction(ours))


class PowerSensor:
    """Reads the supplies repeatedly, and remembers what a single reading does not show."""

    def __init__(self, ups_amperes: Callable[[], float] | None = None) -> None:
        """`ups_amperes`: returns the current into the battery of a UPS board, negative while it feeds the machine.

        Raises OSError.
        """
        self._charge, self._ups_amperes, self._had_battery = ChargeMonitor(), ups_amperes, False

    def read(self, tree: Tree, now_s: float) -> PowerReading:
        """Return the power source read from `tree`; a class that cannot be listed and supplies that
        cannot be read are faults.
        """
        entries = tree.listed(tree.sys / "class/power_supply", "power")
        if entries is None:
            return PowerReading(Power.UNKNOWN, None, "the power supplies cannot be listed")
        if not entries and not tree.children(tree.sys / "class", "power"):
            tree.fault("power", f"{tree.sys / 'class'}: empty or missing; is sysfs mounted there?")
            return PowerReading(Power.UNKNOWN, None, f"the kernel shows nothing in {tree.sys}")
        supplies, unread = [], []
        for entry in entries:
            known_faults = len(tree.faults)
            supply = _read_supply(tree, entry)
            if supply is not None:
                supplies.append(supply)
            silent = supply is None or (supply.is_source and supply.online is Answer.UNKNOWN)
            if silent and len(tree.faults) > known_faults and not entry.name.startswith(_PERIPHERAL_PREFIXES):
                unread.append(entry.name)
        charged = self._charge.look(supplies, now_s)
        reading = judge(supplies, charged, unread, had_battery=self._had_battery)
        self._had_battery |= reading.battery is Answer.YES
        return self._with_ups(tree, reading)

    def feeding(self, tree: Tree) -> str:
        """Return a word that changes when a UPS board starts or stops feeding the machine."""
        if self._ups_amperes is None:
            return ""
        try:
            return str(tree.ask(_UPS_BOARD, self._ups_amperes) < -UPS_REST_AMPERES)
        except OSError:
            return "unknown"

    def _with_ups(self, tree: Tree, reading: PowerReading) -> PowerReading:
        if self._ups_amperes is None:
            return reading
        try:
            amperes = tree.ask(_UPS_BOARD, self._ups_amperes)
        except OSError as error:
            tree.fault("power/ups", str(error))
            return replace(reading, power=Power.UNKNOWN, detail="the UPS board cannot be read")
        if amperes < -UPS_REST_AMPERES:
            return replace(reading, power=Power.BATTERY, detail=f"the UPS board's battery gives {-amperes:.2f} A")
        if reading.power is Power.ASSUMED:
            return replace(reading, power=Power.EXTERNAL, detail=f"the UPS board's battery takes {amperes:.2f} A")
        return reading


def _read_supply(tree: Tree, entry: Path) -> Supply | None:
    text = tree.text(entry / "uevent", f"power/{entry.name}")
    values = parse_uevent(text) if text else {}
    for key in ("TYPE", "SCOPE", "ONLINE", "STATUS", "CAPACITY", "PRESENT"):
        if key not in values:
            single = tree.text(entry / key.lower(), f"power/{entry.name}")
            if single is not None:
                values[key] = single
    if values.get("ONLINE", "0") not in _ONLINE:
        tree.fault(f"power/{entry.name}", f"{entry}: online is {values['ONLINE'][:40]!r}")
    removed = not values and tree.stat(entry, f"power/{entry.name}") is None
    if not values and not removed:
        tree.fault(f"power/{entry.name}", f"{entry}: nothing in it can be read")
    return supply_from_uevent({"NAME": entry.name, **values}) if values else None


def plug_monitor(tree: Tree) -> tuple[str, ...]:
    """Return a quick signature of the plugs, cheap enough for 20 reads a second.

    Only `online` of each supply is read: a battery's gauge can take milliseconds over I2C or the embedded controller.
    """
    found = []
    for entry in tree.children(tree.sys / "class/power_supply", "power"):
        text = tree.text(entry / "online", f"power/{entry.name}")
        if text is None:
            text = tree.text(entry / "uevent", f"power/{entry.name}") or ""
        found.append(f"{entry.name}={text}")
    return tuple(found)


def _capacity(values: Mapping[str, str]) -> float | None:
    text = values.get("CAPACITY", "")
    if text.isdigit():
        percent = float(text)
        return percent if percent <= 100 else None  # a max17040 on a Pi is known to report 101 and nonsense volts
    return _LEVELS.get(values.get("CAPACITY_LEVEL", "").lower())


def _level(batteries: Sequence[Supply]) -> float | None:
    """Return the battery level: the lowest of the batteries that discharge, or else the highest of all."""
    levels = {battery: battery.capacity_percent for battery in batteries if battery.capacity_percent is not None}
    drained = [level for battery, level in levels.items() if battery.status == "discharging"]
    return min(drained) if drained else max(levels.values(), default=None)


def _present(batteries: Sequence[Supply], unread: Collection[str]) -> Answer:
    if batteries:
        return Answer.YES
    return Answer.UNKNOWN if unread else Answer.NO


def _online(supplies: Sequence[Supply]) -> list[str]:
    return [
        supply.name for supply in supplies if supply.is_source and not supply.peripheral and supply.online is Answer.YES
    ]


def _offline(supplies: Sequence[Supply]) -> list[str]:
    return [
        supply.name for supply in supplies if supply.is_source and not supply.peripheral and supply.online is Answer.NO
    ]


def _only_ports(supplies: Sequence[Supply]) -> bool:
    """Return whether mains are offline and only ports are online: a hub or a weak charger cannot power the machine."""
    sources = [supply for supply in supplies if supply.is_source]
    unplugged = any(supply.kind == "mains" and supply.online is Answer.NO for supply in sources)
    return unplugged and all(supply.kind.startswith("usb") for supply in sources if supply.online is Answer.YES)


def _feeds(ups: Supply) -> bool:
    """Return whether a UPS runs from its battery."""
    return ups.online is Answer.NO or ups.status == "discharging"


def _without_battery(supplies: Sequence[Supply], offline: Sequence[str], *, had_battery: bool) -> tuple[Power, str]:
    """Return the power source if no supply is online and none is a battery."""
    mains = [supply.name for supply in supplies if supply.kind == "mains" and supply.online is Answer.NO]
    if had_battery:
        return Power.UNKNOWN, "the battery was removed, and no supply is online"
    if mains:
        return Power.UNKNOWN, f"{', '.join(mains)} says offline, and there is no battery"
    if not supplies:
        return Power.ASSUMED, "the kernel lists no power supply"
    if len(offline) == len(supplies):
        return Power.ASSUMED, f"no battery; {offline[0]} is an unused port"
    return Power.UNKNOWN, _contradiction(supplies)


def _contradiction(supplies: Sequence[Supply]) -> str:
    parts = (f"{supply.name}: {supply.status or supply.online.value}" for supply in supplies)
    return "no supply reports enough (" + "; ".join(parts) + ")"
