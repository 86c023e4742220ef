"""Whether something was typed or moved, from counters of keyboards, mice and touch surfaces, which
show when but never what.

USB counts the transfers of each device (`urbnum`), and a polled device completes a transfer only when it has something
to report. Others are counted by their interrupts: the keyboard controller of a PC (i8042), and devices on I2C by their
name.
"""

import re
from pathlib import Path

from port_agent.facts.sysfs import Tree

SENSOR = "input"
_EVENT = re.compile(r"event\d+")
_EV_REL, _EV_REP = 1 << 2, 1 << 20
"""EV_REL and EV_REP of the kernel's input-event-codes.h: mice, and keyboards with key repeat."""
_KEYBOARD_CONTROLLER = "i8042"


def read_counters(tree: Tree) -> dict[str, int]:
    """Return the counter of each input device used by hand, by name; devices without a counter are left out."""
    counters: dict[str, int] = {}
    names = {_KEYBOARD_CONTROLLER}
    for entry in tree.children(tree.sys / "class/input", SENSOR):
        if not _EVENT.fullmatch(entry.name) or not _by_hand(tree, entry / "device"):
            continue
        name = tree.text(entry / "device/name", f"{SENSOR}/{entry.name}") or entry.name
        count = _transfers(tree, entry)
        if count is None:
            names.add(name.split(" ")[0])
        else:
            counters[name] = counters.get(name, 0) + count
    interrupts = tree.text(tree.proc / "interrupts", f"{SENSOR}/interrupts") or ""
    for line in interrupts.splitlines():
        words = line.split()
        if words and words[-1] in names:
            count = sum(int(word) for word in words[1:] if word.isdigit())
            counters[words[-1]] = counters.get(words[-1], 0) + count
    return counters


def _by_hand(tree: Tree, device: Path) -> bool:
    """Return whether a device is a keyboard, a mouse or a touch surface, rather than a lid,
    a button or a loudspeaker.
    """
    events = tree.text(device / "capabilities/ev", f"{SENSOR}/{device.parent.name}") or "0"
    properties = tree.text(device / "properties", f"{SENSOR}/{device.parent.name}") or "0"
    return bool(_bits(events) & (_EV_REL | _EV_REP)) or bool(_bits(properties))


def _bits(text: str) -> int:
    """Return the lowest word of a bitmap such as `b 120013`."""
    try:
        return int(text.split()[-1], 16)
    except (ValueError, IndexError):
        return 0


def _transfers(tree: Tree, entry: Path) -> int | None:
    """Return the counter of the USB device that an input device is part of; None if it is not on USB."""
    place = tree.resolved(entry, f"{SENSOR}/{entry.name}")
    for folder in () if place is None else place.parents:
        if folder == tree.sys or folder == folder.parent:
            return None
        count = tree.number(folder / "urbnum", f"{SENSOR}/{entry.name}")
        if count is not None:
            return count
    return None
    return None
