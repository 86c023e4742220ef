"""Energy counters of x86 processors, from the powercap tree.

`intel-rapl:*`; AMD Zen uses the same names.

`psys` is the whole platform and already contains the packages, so if it advances, it is used alone. Otherwise the
packages count, and their `dram` sub-zones, which the package counter leaves out (Intel SDM vol. 3, 15.10;
powercap/powercap issue #3). `core` and `uncore` lie inside the package. `intel-rapl-mmio:*` shows the same packages a
second time (mlco2/codecarbon PR #950).
"""

import re
from dataclasses import dataclass
from pathlib import Path

from port_agent.energy.sources.power_source import (
    Coverage,
    Kind,
    SelfTest,
    SensorReading,
    SourceAbsent,
    SourceError,
    SourceInfo,
    read_integer,
    read_text,
)

NAME = "rapl"
_TREES = ("sys/class/powercap", "sys/devices/virtual/powercap/intel-rapl")
_TOP_ZONE = re.compile(r"intel-rapl:\d+")
_MAX_ZONE_WATTS = 1000.0
"""Largest plausible watts of a zone.

If a zone was silent for longer than a wrap takes at this power, the number of wraps is unknown.
"""


@dataclass(frozen=True, slots=True)
class Zone:
    """One counter of the powercap tree."""

    name: str
    path: Path
    range_joules: float
    """Joules at which the counter wraps to zero (max_energy_range_uj)."""


def find_zones(root: Path) -> tuple[Zone, ...]:
    """Return the zones that together cover this machine exactly once; raise `SourceError` if none can be trusted."""
    tops = [_open_zone(path) for path in _top_zone_paths(root)]
    platform = [zone for zone in tops if zone.name == "psys"]
    if platform:
        return tuple(platform[:1])
    packages = _without_mirrors([zone for zone in tops if zone.name.startswith("package")])
    memories = [
        _open_zone(path)
        for zone in packages
        for path in sorted(zone.path.glob(f"{zone.path.name}:*"))
        if read_text(NAME, path / "name") == "dram"
    ]
    if not packages:
        raise SourceError(
            NAME, "the powercap tree has no package or psys zone", "use another source; this machine offers no counter"
        )
    return tuple(packages + memories)


def _without_mirrors(packages: list[Zone]) -> list[Zone]:
    """Return the packages without those that repeat another one's counter.

    Some processors with several dies show the socket's counter once per die (mlco2/codecarbon issue #1274). Two real
    counters that have run for a while never differ by less than a joule.
    """
    kept: list[tuple[Zone, float]] = []
    for zone in packages:
        joules = read_integer(NAME, zone.path / "energy_uj") / 1e6
        if not any(joules > 1000 and abs(joules - other) < 1 for _, other in kept):
            kept.append((zone, joules))
    return [zone for zone, _ in kept]


def _top_zone_paths(root: Path) -> list[Path]:
    for tree in _TREES:
        folder = root / tree
        if not folder.is_dir():
            continue
        names = sorted(path for path in folder.iterdir() if _TOP_ZONE.fullmatch(path.name))
        alive = [path for path in names if path.is_dir()]  # a container shows links that lead nowhere
        if alive:
            return alive
        if names:
            raise SourceError(
                NAME,
                f"{folder} holds only dangling links",
                "a container hides the counters: bind /sys/devices/virtual/powercap into it",
            )
    raise SourceAbsent(NAME, "there is no powercap tree", "load intel_rapl_common, or use another source")


def _open_zone(path: Path) -> Zone:
    name = read_text(NAME, path / "name")
    span_uj = read_integer(NAME, path / "max_energy_range_uj")
    counter_uj = read_integer(NAME, path / "energy_uj")
    if not 0 <= counter_uj <= span_uj:
        raise SourceError(
            NAME,
            f"zone {path.name} ({name}) reads {counter_uj} uJ, outside its own range of {span_uj} uJ",
            "a virtual machine makes up such counters; use an estimated source here",
        )
    return Zone(name, path, span_uj / 1e6)


class RaplSource:
    """The sum of the zones that cover the machine once, as one counter without wraps."""

    def __init__(self, root: Path) -> None:
        self.zones = find_zones(root)
        self._last_joules: list[float] | None = None
        self._last_time_s = 0.0
        self._total_joules = 0.0
        names = {zone.name for zone in self.zones}
        covers = "the platform as the processor sees it (psys)" if "psys" in names else "processor packages"
        if "dram" in names:
            covers += " and memory"
        coverage = Coverage.BOARD if "psys" in names else Coverage.PACKAGE
        self.info = SourceInfo(
            NAME,
            Kind.MEASURED,
            coverage,
            f"{covers}; not disks, screen, power supply",
            # Zones update about once per millisecond in units of 61 uJ (Intel SDM: default energy unit 2^-14 J).
            resolution_watts=2**-14 * len(self.zones),
            period_s=1.0,
        )

    def read(self, now_s: float) -> SensorReading:
        """Return the energy since opening in joules, with wraps undone.

        Raises `SourceError` when a zone fails, or was silent so long that its wraps cannot be counted; the
        next reading starts again from there, so that one failure costs one gap.
        """
        before, self._last_joules = self._last_joules, None
        current = [self._counter_joules(zone) for zone in self.zones]
        elapsed_s = now_s - self._last_time_s
        self._last_joules, self._last_time_s = current, now_s
        if before is not None:
            steps = zip(self.zones, before, current, strict=True)
            self._total_joules += sum(_advance(zone, old, new, elapsed_s) for zone, old, new in steps)
        return SensorReading(now_s, counter_joules=self._total_joules)

    def _counter_joules(self, zone: Zone) -> float:
        joules = read_integer(NAME, zone.path / "energy_uj") / 1e6
        if not 0 <= joules <= zone.range_joules:
            raise SourceError(
                NAME,
                f"zone {zone.path.name} reads {joules:.1f} J, outside its range of {zone.range_joules:.1f} J",
                "the counter is broken or made up by a virtual machine; use another source",
            )
        return joules

    def self_test(self, now_s: float) -> SelfTest:
        """Return whether the counters can be read, and which zones are added."""
        try:
            self.read(now_s)
        except SourceError as error:
            return SelfTest(False, error.problem, error.remedy)
        return SelfTest(True, "adds " + ", ".join(f"{zone.path.name} ({zone.name})" for zone in self.zones))

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _advance(zone: Zone, old_joules: float, new_joules: float, elapsed_s: float) -> float:
    """Return the joules that `zone` counted in `elapsed_s`; raise `SourceError` if that cannot be known."""
    if elapsed_s * _MAX_ZONE_WATTS > zone.range_joules:
        raise SourceError(
            NAME,
            f"{elapsed_s:.0f} s since the last read of {zone.path.name}, which may wrap every "
            f"{zone.range_joules / _MAX_ZONE_WATTS:.0f} s",
            "the next read is valid again; this happens after suspension",
        )
    step = new_joules - old_joules
    if step < 0:
        step += zone.range_joules
    if step > _MAX_ZONE_WATTS * max(elapsed_s, 0.01):
        raise SourceError(
            NAME,
            f"{zone.path.name} jumped by {step:.1f} J in {elapsed_s:.2f} s",
            "the counter was reset (suspension, driver reload); the next read is valid again",
        )
    return step
