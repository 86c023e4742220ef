"""Power of a Raspberry Pi 5 from its power chip.

Older Pis have no sensor; they use the estimated source.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from port_agent.energy.sources.power_source import Coverage, Kind, SourceError, SourceInfo
from port_agent.energy.sources.subprocess_source import ToolSource, command_output

NAME = "pi5-pmic"
COMMAND = ("vcgencmd", "pmic_read_adc")
_LINE = re.compile(r"\s*(\w+)_([AV]) (current|volt)\((\d+)\)=(\d+\.\d{8})([AV])")
_WITHOUT_CURRENT = frozenset({"EXT5V", "BATT"})
_REMEDY = "only the Raspberry Pi 5 family has this command, and it needs group `video` for /dev/vcio"


@dataclass(frozen=True, slots=True)
class PmicDump:
    """One output of `vcgencmd pmic_read_adc`, by rail name without the suffix _A or _V."""

    amperes: dict[str, float]
    volts: dict[str, float]

    @property
    def rail_watts(self) -> dict[str, float]:
        """Watts of each rail for which both figures are given."""
        return {name: amperes * self.volts[name] for name, amperes in self.amperes.items() if name in self.volts}

    def total_watts(self) -> float:
        """Return the sum of all rails. The board draws more, because EXT5V (USB, fan, HATs) reports no current.

        Raises `SourceError` if a rail lacks one of its two figures, which means that lines are missing.
        """
        halves = (self.amperes.keys() ^ self.volts.keys()) - _WITHOUT_CURRENT
        if halves or not self.volts.keys() >= _WITHOUT_CURRENT or not self.amperes:
            missing = ", ".join(sorted(halves)) or "the supply voltage"
            raise SourceError(NAME, f"lines are missing: {missing} is not complete", _REMEDY)
        return sum(self.rail_watts.values())


def parse_pmic(text: str) -> PmicDump:
    """Return the figures of a dump; raise `SourceError` for any line that is invalid or truncated.

    Rail names contain digits ("3V3_SYS"), so figures are read only after the equals sign.
    """
    if not text.endswith("\n"):
        raise SourceError(NAME, f"output truncated at {text[-30:]!r}", _REMEDY)
    dump = PmicDump({}, {})
    for line in text.splitlines():
        match = _LINE.fullmatch(line.rstrip())
        if not match or match[2] != match[6] or (match[2] == "A") != (match[3] == "current"):
            raise SourceError(NAME, f"cannot read the line {line[:60]!r}", _REMEDY)
        (dump.amperes if match[2] == "A" else dump.volts)[match[1]] = float(match[5])
    return dump


def read_pmic() -> str:
    """Return the power chip's current values; raise `SourceError` if there is none."""
    return command_output(NAME, COMMAND, _REMEDY)


def pi5_source(read_dump: Callable[[], str] = read_pmic) -> ToolSource:
    """Return the sum of the rails of the Pi 5's power chip: a lower bound of the board's power."""
    info = SourceInfo(
        NAME,
        Kind.MEASURED,
        Coverage.RAILS,
        "rails behind the power chip: a lower bound, without USB devices, fan, HATs and conversion losses",
        resolution_watts=0.001,  # figures come in steps of 0.1 to 1 mA (differences in the recorded dumps)
        period_s=2.0,  # each reading starts a process of a few ms
    )
    return ToolSource(info, lambda _: read_dump(), lambda text: parse_pmic(text).total_watts())
