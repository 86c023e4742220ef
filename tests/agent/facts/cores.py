"""Trees of boards with several kinds of cores.

Speeds and `capacity-dmips-mhz` as they were quoted from those boards; capacities as the kernel
computes them from the two.
"""

from collections.abc import Sequence
from pathlib import Path

from port_agent.facts.sysfs import Tree
from tests.agent.trees import write_tree

Kind = tuple[int, str | None, int | None, int | None]
"""Number of cores, MIDR_EL1, top speed in kHz, capacity."""

RK3588 = [
    (4, "0x00000000412fd050", 1800000, 397),
    (2, "0x00000000414fd0b0", 2400000, 1024),
    (2, "0x00000000414fd0b0", 2256000, 962),
]
"""Orange Pi 5 Max, Rock 5B: A55 and two policies of A76, of which some reach 2.256 GHz only
(capacity-dmips-mhz 530 and 1024).
"""
RK3399 = [(4, "0x00000000410fd034", 1512000, None), (2, "0x00000000410fd082", 2016000, None)]
"""google/benchmark issue 1385: before kernels had `cpu_capacity`."""
S922X = [(2, "0x00000000410fd034", 2016000, 469), (4, "0x00000000410fd092", 2400000, 1024)]
"""Odroid N2+: two A53 and four A73."""
PI_5 = [(4, "0x00000000414fd0b1", 2400000, 1024)]
ORIN_NANO = [(6, "0x00000000410fd421", 1510400, 1024)]
"""Six Cortex-A78AE, as the 15 W mode clocks them."""


def machine(root: Path, kinds: Sequence[Kind], online: str | None = None) -> Tree:
    files: dict[str, str] = {}
    number = 0
    for count, midr, top_khz, capacity in kinds:
        for _ in range(count):
            core = f"devices/system/cpu/cpu{number}"
            given = {
                "regs/identification/midr_el1": midr,
                "cpufreq/cpuinfo_max_freq": top_khz,
                "cpu_capacity": capacity,
            }
            files |= {f"{core}/{name}": f"{value}\n" for name, value in given.items() if value is not None}
            files[f"{core}/topology/core_id"] = f"{number}\n"
            number += 1
    files |= {
        "devices/system/cpu/online": f"{online or f'0-{number - 1}'}\n",
        "devices/system/cpu/cpufreq/policy0/scaling_governor": "",
    }
    return Tree(sys=write_tree(root, files))
