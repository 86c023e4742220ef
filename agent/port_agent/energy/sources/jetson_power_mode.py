"""The power mode of a Jetson, which determines the online cores, their speeds, and so every measured figure.

Read from nvpmodel's files, which are readable to all: /var/lib/nvpmodel/status ("pmode:0002") and the modes' names in
/etc/nvpmodel.conf ("< POWER_MODEL ID=2 NAME=MODE_30W >"). `nvpmodel -q` prints the same, on some releases only to root.
"""

import re
from pathlib import Path

_STATUS = "var/lib/nvpmodel/status"
_MODES = "etc/nvpmodel.conf"
_CURRENT = re.compile(r"\bpmode:(\d+)")
_MODE = re.compile(r"^<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", re.MULTILINE)
_DEFAULT = re.compile(r"^<\s*PM_CONFIG\s+DEFAULT=(\d+)\s*>", re.MULTILINE)
_LONGEST_NAME = 40


def power_mode(root: Path = Path("/")) -> str | None:
    """Return the name of the current power mode ("MODE_30W"); None on machines without nvpmodel.

    If no mode was ever set, it is the configuration's default; a mode without a name is named by its number.
    """
    modes = _text(root / _MODES)
    chosen = _CURRENT.search(_text(root / _STATUS)) or _DEFAULT.search(modes)
    if chosen is None:
        return None
    names: dict[int, str] = {int(number): name for number, name in _MODE.findall(modes)}
    number = int(chosen[1])
    return names.get(number, str(number))[:_LONGEST_NAME]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
