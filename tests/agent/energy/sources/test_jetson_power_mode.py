"""A Jetson's power mode, from the files that nvpmodel keeps."""

from pathlib import Path

import pytest

from port_agent.energy.sources.jetson_power_mode import power_mode

ORIN_NANO = """\
# nvpmodel.conf of a Jetson Orin Nano, L4T R36 (its parameters left out)
< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_1 /sys/devices/system/cpu/cpu1/online

< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_1 1
< POWER_MODEL ID=1 NAME=7W >
CPU_ONLINE CORE_1 1
< PM_CONFIG DEFAULT=0 >
"""


def machine(root: Path, status: str | None, modes: str | None = ORIN_NANO) -> Path:
    for name, text in (("var/lib/nvpmodel/status", status), ("etc/nvpmodel.conf", modes)):
        if text is not None:
            (root / name).parent.mkdir(parents=True)
            (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("status", "modes", "name"),
    [
        ("pmode:0001\n", ORIN_NANO, "7W"),
        ("pmode:0000 fmode:quiet\n", ORIN_NANO, "15W"),
        (None, ORIN_NANO, "15W"),
        ("pmode:0008\n", ORIN_NANO, "8"),
        ("pmode:0002\n", None, "2"),
        ("damaged", "damaged", None),
        (None, None, None),
    ],
)
def test_the_mode_that_is_set_by_its_name(
    status: str | None, modes: str | None, name: str | None, tmp_path: Path
) -> None:
    assert power_mode(machine(tmp_path, status, modes)) == name
