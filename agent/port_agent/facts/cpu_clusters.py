"""The kinds of cores of a machine, such as big.LITTLE clusters, as the Linux kernel reports them for each core.

`cpu_capacity` is the kernel's own measure of a core at its top speed, 1024 for the fastest kind (arm64 and RISC-V, if
the device tree has it); elsewhere the top speed alone, `cpufreq/cpuinfo_max_freq` in kHz.
`regs/identification/midr_el1` names an Arm core.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from port_agent.facts.sysfs import Tree
from port_planner.base.processor import ARM, ARM_PARTS

SENSOR = "cpu cores"
_CORE = re.compile(r"cpu(\d+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_ALIKE = 0.9
"""Largest relative difference between cores of one kind: some cores of a chip run a few percent faster."""


@dataclass(frozen=True, slots=True)
class CpuCluster:
    """Cores of one kind."""

    cores: tuple[int, ...]
    """Numbers of the cluster's cores, ascending."""
    name: str | None
    """Name of the cores, such as Cortex-A76; None if unknown."""
    top_hz: float | None
    capacity: int | None
    """The kernel's measure, 1024 for the fastest kind."""

    @property
    def text(self) -> str:
        """The cluster in words, such as `4 x Cortex-A76 at 2.4 GHz`."""
        speed = "" if self.top_hz is None else f" at {self.top_hz / 1e9:.3g} GHz"
        return f"{len(self.cores)} x {self.name or 'core'}{speed}"


@dataclass(frozen=True, slots=True)
class _CpuCore:
    number: int
    name: str | None
    top_khz: int | None
    capacity: int | None

    @property
    def speed(self) -> int:
        return self.capacity or self.top_khz or 0


def read_clusters(tree: Tree, usable: Collection[int] | None = None) -> tuple[CpuCluster, ...]:
    """Return the kinds of cores that are online, the fastest first. Only the numbers in `usable` count.

    None if the kernel lists none.
    """
    folder = tree.sys / "devices/system/cpu"
    online = _numbers(tree.text(folder / "online", SENSOR))
    cores = []
    for entry in tree.children(folder, SENSOR):
        match = _CORE.fullmatch(entry.name)
        if match is None:
            continue
        number = int(match[1])
        if (online is None or number in online) and (usable is None or number in usable):
            midr = tree.text(entry / "regs/identification/midr_el1", SENSOR)
            top_khz = tree.number(entry / "cpufreq/cpuinfo_max_freq", SENSOR)
            cores.append(_CpuCore(number, _arm_name(midr), top_khz, tree.number(entry / "cpu_capacity", SENSOR)))
    cores.sort(key=lambda core: (-core.speed, core.number))
    kinds: list[list[_CpuCore]] = []
    for core in cores:
        first = kinds[-1][0] if kinds else None
        if first is not None and core.name == first.name and core.speed >= _ALIKE * first.speed:
            kinds[-1].append(core)
        else:
            kinds.append([core])
    return tuple(_cluster(kind) for kind in kinds)


def clusters_text(clusters: tuple[CpuCluster, ...]) -> str:
    """Return a text such as `4 x Cortex-A76 at 2.4 GHz + 4 x Cortex-A55 at 1.8 GHz`."""
    return " + ".join(cluster.text for cluster in clusters)


def _cluster(kind: list[_CpuCore]) -> CpuCluster:
    first = kind[0]
    top_hz = None if first.top_khz is None else first.top_khz * 1e3
    return CpuCluster(tuple(sorted(core.number for core in kind)), first.name, top_hz, first.capacity)


def _numbers(text: str | None) -> frozenset[int] | None:
    """Return the numbers of a kernel's list such as `0-3,6`."""
    if not text:
        return None
    return frozenset(n for low, high in _RANGE.findall(text) for n in range(int(low), int(high or low) + 1))


def _arm_name(midr: str | None) -> str | None:
    """Return the core that a MIDR_EL1 names (`0x00000000412fd050` is a Cortex-A55), None for others."""
    try:
        register = int(midr or "0", 16)
    except ValueError:
        return None
    return ARM_PARTS.get(register >> 4 & 0xFFF) if register >> 24 & 0xFF == ARM else None
