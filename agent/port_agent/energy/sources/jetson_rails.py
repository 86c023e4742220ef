"""Which rails of a Jetson add up to the board's total, and which of them feeds the GPU.

INA3221 and tegrastats use the same names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from port_agent.energy.sources.power_source import Coverage, GpuReading, SourceError

TOTAL_RAILS = ("VDD_IN", "POM_5V_IN", "VIN")
"""Rails that are the board's input; all others are fed by them (TX2, Xavier NX, Orin Nano/NX; Nano; Thor)."""

SUMS = (
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),  # AGX Orin
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),  # AGX Xavier (jetson_stats issue #51: the total is the sum of all)
)
"""Sums for boards without an input rail: these rails together feed the module and the 5 V
system, but not the carrier.
"""

GPU_RAILS = {
    "VDD_GPU_SOC": "the GPU with the rest of the chip's core",  # AGX Orin
    "VDD_CPU_GPU_CV": "the GPU with CPU and vision accelerators",  # Xavier NX, Orin Nano/NX
    "VDD_SYS_GPU": "the GPU alone",  # TX2
    "POM_5V_GPU": "the GPU alone",  # Nano
    "GPU": "the GPU alone",  # AGX Xavier
    "VDD_GPU": "the GPU alone",  # Thor
}
"""Rail that feeds the GPU -> what else it feeds. Each is part of the total."""


@dataclass(frozen=True, slots=True)
class GpuRail:
    """The rail that feeds a board's GPU, and a description of what it feeds."""

    name: str
    feeds: str

    @property
    def covers(self) -> str:
        """Which part of the total it is, in words."""
        return f"{self.name} of it feeds {self.feeds}"

    def reads(self, watts: float) -> str:
        """The rail's reading in words."""
        return f"of it {watts:.2f} W on {self.name}, which feeds {self.feeds}"


def gpu_rail(names: Iterable[str]) -> GpuRail | None:
    """Return the board's rail that is known to feed its GPU, or None."""
    measured = set(names)
    return next((GpuRail(name, feeds) for name, feeds in GPU_RAILS.items() if name in measured), None)


@dataclass(frozen=True, slots=True)
class BoardTotal:
    """The board's power, the rails from which it was computed, and the GPU's power."""

    watts: float
    rails: tuple[str, ...]
    gpu: GpuRail | None = None
    gpu_watts: float | None = None

    @property
    def gpu_reading(self) -> GpuReading | None:
        """The rail that feeds the GPU, as a part of the total; None if none is known."""
        if self.gpu is None or self.gpu_watts is None:
            return None
        return GpuReading(self.gpu_watts, f"{self.gpu.name}, which feeds {self.gpu.feeds}")

    @property
    def coverage(self) -> Coverage:
        """Coverage: the board if one input rail was read, otherwise a sum of rails."""
        return Coverage.BOARD if len(self.rails) == 1 else Coverage.RAIL_SUM

    @property
    def covers(self) -> str:
        """What the figure includes, in words."""
        gpu = "" if self.gpu is None else f"; {self.gpu.covers}"
        if len(self.rails) == 1:
            return f"whole board ({self.rails[0]}){gpu}"
        return f"{' + '.join(self.rails)}, which is all but the carrier board: this board has no input rail{gpu}"


def board_total(source: str, rail_watts: Mapping[str, float]) -> BoardTotal:
    """Return the total of `rail_watts`; raise `SourceError` if rails that belong to it are missing."""
    gpu = gpu_rail(rail_watts)
    gpu_watts = None if gpu is None else rail_watts[gpu.name]
    for name in TOTAL_RAILS:
        if name in rail_watts:
            return BoardTotal(rail_watts[name], (name,), gpu, gpu_watts)
    for names in SUMS:
        if all(name in rail_watts for name in names):
            return BoardTotal(sum(rail_watts[name] for name in names), names, gpu, gpu_watts)
    raise SourceError(
        source,
        f"rails {', '.join(sorted(rail_watts)) or 'none'} do not make a known total",
        "report the board and these rails, or name another source with energy.source",
    )
