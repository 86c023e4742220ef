"""Power of a Jetson board from lines of `tegrastats`.

For boards whose sensors are not readable directly.

Rails come as `now/average` milliwatts without a unit (L4T R32), `nowmW/averagemW` (R35, R36) or
`nowmW/averagemW/peakmW` (R39). Temperatures look like `cpu@52.9C`, since R39 `cpu@52.9C/52.9C`; a zone that is
switched off reads -256.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from port_agent.energy.sources.base import Coverage, Kind, SourceError, SourceInfo
from port_agent.energy.sources.jetson_rails import BoardTotal, board_total
from port_agent.energy.sources.subprocess_source import ChildOutput, ToolSource

NAME = "tegrastats"
_PERIOD_S = 1.0
_ABSENT_CELSIUS = -256.0
_MEMORY = re.compile(r"RAM (\d+)/(\d+)MB \(lfb ")
_RAIL = re.compile(r"(?<![^ ])(?!RAM |SWAP |IRAM )([A-Z][A-Z0-9_]*) (\d+(?:mW)?/\S*)(?= |$)")
_FIGURES = re.compile(r"(\d+)/(\d+)|(\d+)mW/(\d+)mW(?:/(\d+)mW)?")
_TEMPERATURE = re.compile(r"(?<![^ ])([A-Za-z]\w*)@(-?\d+(?:\.\d+)?)C(?:/-?\d+(?:\.\d+)?C)?(?= |$)")
_REMEDY = "see whether tegrastats still runs and which L4T release it is from"


@dataclass(frozen=True, slots=True)
class Rail:
    """One rail of one line, in watts."""

    name: str
    watts: float
    average_watts: float
    peak_watts: float | None


@dataclass(frozen=True, slots=True)
class TegraLine:
    """What one line says."""

    memory_used_bytes: int
    memory_total_bytes: int
    rails: tuple[Rail, ...]
    celsius: Mapping[str, float | None]
    """By zone name in lower case; None for a zone that is switched off."""

    @property
    def total(self) -> BoardTotal:
        """The board's power now; raises `SourceError` if its rails are not all there."""
        return board_total(NAME, {rail.name: rail.watts for rail in self.rails})


def parse_line(line: str) -> TegraLine:
    """Return what a whole line says, newline included; raise `SourceError` if it is cut off or garbled."""
    if not line.endswith("\n"):
        raise SourceError(NAME, f"line cut off at {line[-30:]!r}", _REMEDY)
    memory = _MEMORY.search(line)
    if not memory:
        raise SourceError(NAME, f"no tegrastats line: {line[:60]!r}", _REMEDY)
    body = line.rstrip("\n").rstrip(" ")
    rails = tuple(_parse_rail(match[1], match[2]) for match in _RAIL.finditer(body))
    # Rails close the line, so a line that ends otherwise has lost its end.
    if not rails or not _RAIL.fullmatch(" ".join(body.split(" ")[-2:])):
        raise SourceError(NAME, f"no rails at the end of the line: {body[-40:]!r}", _REMEDY)
    zones = {match[1].lower(): float(match[2]) for match in _TEMPERATURE.finditer(body)}
    celsius = {name: None if value == _ABSENT_CELSIUS else value for name, value in zones.items()}
    return TegraLine(int(memory[1]) << 20, int(memory[2]) << 20, rails, celsius)


def _parse_rail(name: str, figures: str) -> Rail:
    match = _FIGURES.fullmatch(figures)
    if not match:
        raise SourceError(NAME, f"rail {name} reads {figures!r}", _REMEDY)
    now, average = (match[1], match[2]) if match[1] else (match[3], match[4])
    peak = int(match[5]) / 1000 if match[5] else None
    return Rail(name, int(now) / 1000, int(average) / 1000, peak)


def tegrastats_source(output: ChildOutput) -> ToolSource:
    """Return the newest line of a `tegrastats` that runs as a child process."""
    info = SourceInfo(
        NAME,
        Kind.MEASURED,
        Coverage.BOARD,
        "whole board, or the sum of rails that AGX boards have; the rail that feeds the GPU lies within it",
        resolution_watts=0.04,  # the INA3221 behind it
        period_s=_PERIOD_S,
    )
    return ToolSource(
        info,
        output.newest,
        lambda line: parse_line(line).total.watts,
        output.close,
        lambda line: parse_line(line).total.gpu_reading,
    )
