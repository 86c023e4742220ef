"""A machine whose firmware says its name, played to programs that are started."""

import os
from pathlib import Path

DEVICE_TREE, DMI = "/proc/device-tree/model", "/sys/class/dmi/id/product_name"
NAMED_MACHINES = {
    "nameless": (DMI, ""),
    "device tree": (DEVICE_TREE, "Raspberry Pi 4 Model B Rev 1.4\0"),
    "DMI": (DMI, "Jetson AGX Orin Developer Kit\n"),
    "DMI, no board of ours": (DMI, "XPS 13 9310\n"),
}
"""Which file says the name, and what it says."""

_CUSTOMIZED = """
import pathlib
_read_text = pathlib.Path.read_text

def read_text(self, *arguments, **options):
    found = {names!r}.get(str(self))
    return _read_text(self, *arguments, **options) if found is None else found

pathlib.Path.read_text = read_text
"""


def named_machine(folder: Path, machine: str, then: str = "") -> dict[str, str]:
    """Return the environment in which Python finds the firmware's name of one of `NAMED_MACHINES`, and
    runs `then` when it starts.
    """
    folder.mkdir(exist_ok=True)
    place, name = NAMED_MACHINES[machine]
    names = {DEVICE_TREE: "", DMI: "", place: name}
    (folder / "sitecustomize.py").write_text(_CUSTOMIZED.format(names=names) + then)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}
