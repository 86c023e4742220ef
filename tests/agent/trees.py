"""Build small /sys and /proc trees for sensor tests."""

from collections.abc import Mapping
from pathlib import Path

import pytest

SHARED_FIXTURES = Path(__file__).resolve().parents[2] / "../shared/fixtures"

LAPTOP_BATTERY = """POWER_SUPPLY_NAME=BAT0
POWER_SUPPLY_TYPE=Battery
POWER_SUPPLY_STATUS={status}
POWER_SUPPLY_PRESENT=1
POWER_SUPPLY_CAPACITY={capacity}
"""
MAINS = "POWER_SUPPLY_NAME=ACAD\nPOWER_SUPPLY_TYPE=Mains\nPOWER_SUPPLY_ONLINE={online}\n"
MOUSE = """POWER_SUPPLY_NAME=hidpp_battery_3
POWER_SUPPLY_TYPE=Battery
POWER_SUPPLY_ONLINE=1
POWER_SUPPLY_STATUS=Discharging
POWER_SUPPLY_SCOPE=Device
POWER_SUPPLY_MODEL_NAME=MX Anywhere 3
POWER_SUPPLY_CAPACITY=35
"""


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Write `files` (relative path -> content) below `root`, each at once as the kernel's are, and return it."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f".{path.name}")
        written.write_text(content)
        written.rename(path)
    return root


def supply_tree(root: Path, **uevents: str) -> Path:
    """Write a /sys with these power supplies."""
    (root / "class/power_supply").mkdir(parents=True, exist_ok=True)
    return write_tree(root, {f"class/power_supply/{name}/uevent": text for name, text in uevents.items()})


def recorded(name: str) -> str:
    """Return a recorded output of a real machine, or skip where the recordings are not at hand."""
    path = SHARED_FIXTURES / name
    if not path.is_file():
        pytest.skip(f"no recorded output {name} (directory `shared` beside the checkout)")
    return path.read_text()
