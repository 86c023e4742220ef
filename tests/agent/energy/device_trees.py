"""Trees under / as kernels write them for power sensors, batteries and disks."""

import os
from pathlib import Path


def hwmon(root: Path, device: str, rails: dict[int, tuple[str, int, int]], driver: str = "ina3221") -> Path:
    """Write an INA3221 (L4T 32.x with driver `ina3221x`, later `ina3221`): label, mV, mA by channel."""
    folder = root / f"sys/bus/i2c/drivers/{driver}/{device}/hwmon/hwmon3"
    folder.mkdir(parents=True)
    for number, (label, millivolts, milliamperes) in rails.items():
        (folder / f"in{number}_label").write_text(f"{label}\n")
        (folder / f"in{number}_input").write_text(f"{millivolts}\n")
        (folder / f"curr{number}_input").write_text(f"{milliamperes}\n")
    (folder / "in7_label").write_text("sum of shunt voltages\n")
    (folder / "in7_input").write_text("9999\n")
    return folder


ORIN_NANO = {1: ("VDD_IN", 4960, 960), 2: ("VDD_CPU_GPU_CV", 4960, 104), 3: ("VDD_SOC", 4960, 288)}


RANGE_UJ = 262143999938
"""max_energy_range_uj of the recorded i7-4770S."""
TREE = "sys/class/powercap"


def zone(root: Path, path: str, name: str, energy_uj: int, range_uj: int = RANGE_UJ) -> Path:
    """Write one zone of the powercap tree and return its folder."""
    folder = root / TREE / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return folder


def supply(root: Path, name: str, uevent: str) -> Path:
    """Write one power supply and return its uevent file."""
    folder = root / "sys/class/power_supply" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "uevent").write_text(uevent)
    return folder / "uevent"


STAT = "    4219      312   283650     2260     8841     9907   432176    12345        0     9080    15630        0        0        0        0      210     1021\n"


def disk(root: Path, folder: Path, partition: bool = True) -> Path:
    """Write the sysfs entry of the disk that holds `folder`, reached over its partition."""
    device = folder.stat().st_dev
    real = root / "sys/devices/mmc0/block/mmcblk0"
    leaf = real / "mmcblk0p2" if partition else real
    leaf.mkdir(parents=True)
    if partition:
        (leaf / "partition").write_text("2\n")
    (real / "stat").write_text(STAT)
    links = root / "sys/dev/block"
    links.mkdir(parents=True)
    (links / f"{os.major(device)}:{os.minor(device)}").symlink_to(leaf)
    return real
