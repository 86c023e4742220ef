"""Where the power comes from, by Linux' power_supply class.

The rule, from what other programs got wrong (peripheral batteries, hard-coded adapter names, USB-C):
skip supplies of scope Device; any online Mains, USB or Wireless supply is external power; a system battery that
discharges with none online is battery power; nothing listed is "assumed external"; the rest is unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from port_agent.facts.readings import Answer, Power, PowerReading
from port_agent.facts.sysfs import Tree

_PERIPHERAL_PREFIXES = ("hid-", "hidpp_", "sony_controller", "wacom_", "ps-controller")
"""Drivers of mice, keyboards, pens and pads; old kernels do not set SCOPE for all of them."""

_LEVELS = {"full": 100.0, "high": 80.0, "normal": 50.0, "low": 15.0, "critical": 3.0}
"""Rough percent for gauges that only give a capacity level word."""


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
        return self.kind == "mains" or self.kind == "wireless" or self.kind.startswith("usb")


def supply_from_uevent(values: Mapping[str, str]) -> Supply:
    """Return the supply that uevent lines (without `POWER_SUPPLY_`) describe."""
    name = values.get("NAME", "")
    kind = values.get("TYPE", "").lower() or ("battery" if "STATUS" in values else "")
    online = {"0": Answer.NO, "1": Answer.YES, "2": Answer.YES}.get(values.get("ONLINE", ""), Answer.UNKNOWN)
    return Supply(
        name=name,
        kind=kind,
        online=online,
        status=values.get("STATUS", "").lower(),
        capacity_percent=_capacity(values),
        peripheral=values.get("SCOPE", "").lower() == "device" or name.startswith(_PERIPHERAL_PREFIXES),
        present=values.get("PRESENT", "1") != "0",
    )


def parse_uevent(text: str) -> dict[str, str]:
    """Return `POWER_SUPPLY_X=y` lines as {"X": "y"}; a repeated key keeps its last value."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {
        key.removeprefix("POWER_SUPPLY_"): value.strip() for key, _, value in pairs if key.startswith("POWER_SUPPLY_")
    }


def judge(supplies: Sequence[Supply]) -> PowerReading:
    """Return the power source that the whole list of supplies means."""
    ours = [supply for supply in supplies if not supply.peripheral]
    sources = [supply for supply in ours if supply.is_source]
    batteries = [supply for supply in ours if supply.kind == "battery" and supply.present]
    level = _lowest_level(batteries)
    if not sources and not batteries:
        return PowerReading(Power.ASSUMED, None, "the kernel lists no power supply")
    plugged = [supply.name for supply in sources if supply.online is Answer.YES]
    if plugged:
        return PowerReading(Power.EXTERNAL, level, f"{', '.join(plugged)} online")
    draining = [supply.name for supply in batteries if supply.status == "discharging"]
    if draining:
        return PowerReading(Power.BATTERY, level, f"{', '.join(draining)} discharging")
    held = [battery for battery in batteries if battery.status in ("charging", "full", "not charging")]
    if held:
        return PowerReading(Power.EXTERNAL, level, f"{held[0].name} is {held[0].status}")
    if not batteries and all(supply.online is Answer.NO for supply in sources):
        return PowerReading(Power.ASSUMED, None, f"no battery; {sources[0].name} is an unused port")
    return PowerReading(Power.UNKNOWN, level, _contradiction(ours))


def read_power(tree: Tree) -> PowerReading:
    """Return the power source read from `tree`; supplies that cannot be read are faults."""
    entries = tree.children(tree.sys / "class/power_supply", "power")
    supplies = [supply for entry in entries if (supply := _read_supply(tree, entry)) is not None]
    if entries and not supplies:
        return PowerReading(Power.UNKNOWN, None, f"none of {len(entries)} power supplies can be read")
    return judge(supplies)


def _read_supply(tree: Tree, entry: Path) -> Supply | None:
    text = tree.text(entry / "uevent", f"power/{entry.name}")
    values = parse_uevent(text) if text else {}
    for key in ("TYPE", "SCOPE", "ONLINE", "STATUS", "CAPACITY", "PRESENT"):
        if key not in values:
            single = tree.text(entry / key.lower(), f"power/{entry.name}")
            if single is not None:
                values[key] = single
    if not values:
        tree.fault(f"power/{entry.name}", f"{entry}: nothing in it can be read")
        return None
    return supply_from_uevent({"NAME": entry.name, **values})


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


def _lowest_level(batteries: Sequence[Supply]) -> float | None:
    levels = [battery.capacity_percent for battery in batteries if battery.capacity_percent is not None]
    return min(levels, default=None)


def _contradiction(supplies: Sequence[Supply]) -> str:
    parts = (f"{supply.name}: {supply.status or supply.online.value}" for supply in supplies)
    return "no supply says enough (" + "; ".join(parts) + ")"
