"""Which rails of a Jetson make the board's total. INA3221 and tegrastats name them alike."""

from collections.abc import Mapping
from dataclasses import dataclass

from agent.energy.sources.base import Coverage, SourceError

TOTAL_RAILS = ("VDD_IN", "POM_5V_IN")
"""Rails that are the board's input; all others lie behind them (TX2, Xavier NX, Orin Nano/NX; Nano)."""

SUMS = (
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),  # AGX Orin
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),  # AGX Xavier (jetson_stats issue #51: the total is the sum of all)
)
"""Boards without an input rail: these together feed module and 5 V system; the carrier is not in them."""


@dataclass(frozen=True, slots=True)
class BoardTotal:
    """The board's power and which rails it came from."""

    watts: float
    rails: tuple[str, ...]

    @property
    def coverage(self) -> Coverage:
        """Board when one input rail was read, a sum of rails otherwise."""
        return Coverage.BOARD if len(self.rails) == 1 else Coverage.RAIL_SUM

    @property
    def covers(self) -> str:
        """In words what the figure contains."""
        if len(self.rails) == 1:
            return f"whole board ({self.rails[0]})"
        return f"{' + '.join(self.rails)}, which is all but the carrier board: this board has no input rail"


def board_total(source: str, rail_watts: Mapping[str, float]) -> BoardTotal:
    """Return the total of `rail_watts`; raise `SourceError` when the rails that make it are not all there."""
    for name in TOTAL_RAILS:
        if name in rail_watts:
            return BoardTotal(rail_watts[name], (name,))
    for names in SUMS:
        if all(name in rail_watts for name in names):
            return BoardTotal(sum(rail_watts[name] for name in names), names)
    raise SourceError(
        source,
        f"rails {', '.join(sorted(rail_watts)) or 'none'} do not make a known total",
        "report the board and these rails, or name another source with energy.source",
    )
