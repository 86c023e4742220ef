"""Power of a Jetson board from lines of `tegrastats`.

For boards whose sensors are not readable directly.

Rails come as `now/average` milliwatts without a unit (L4T R32), `nowmW/averagemW` (R35, R36) or
`nowmW/averagemW/peakmW` (R39).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from port_agent.energy.sources.jetson_rails import BoardTotal, board_total
from port_agent.energy.sources.power_source import Coverage, Kind, SourceError, SourceInfo
from port_agent.energy.sources.subprocess_source import ChildOutput, ToolSource

NAME = "tegrastats"
_PERIOD_S = 1.0
_MEMORY = re.compile(r"RAM \d+/\d+MB \(lfb ")
_RAIL = re.compile(r"(?<![^ ])(?!RAM |SWAP |IRAM )([A-Z][A-Z0-9_]*) (\d+(?:mW)?/\S*)(?= |$)")
_FIGURES = re.compile(r"(\d+)/\d+|(\d+)mW/\d+mW(?:/\d+mW)?")
"""Pattern of a rail's figures: milliwatts now, on average, and (since R39) at most."""
_REMEDY = "check that tegrastats still runs, and its L4T release"


@dataclass(frozen=True, slots=True)
class TegraLine:
    """The contents of one line."""

    rails: Mapping[str, float]
    """Watts now, by name."""

    @property
    def total(self) -> BoardTotal:
        """The board's power now; raises `SourceError` if rails are missing."""
        return board_total(NAME, self.rails)


def parse_line(line: str) -> TegraLine:
    """Parse a whole line, newline included; raise `SourceError` if it is truncated or garbled."""
    if not line.endswith("\n"):
        raise SourceError(NAME, f"line truncated at {line[-30:]!r}", _REMEDY)
    if not _MEMORY.search(line):
        raise SourceError(NAME, f"not a tegrastats line: {line[:60]!r}", _REMEDY)
    body = line.rstrip("\n").rstrip(" ")
    rails = {match[1]: _watts(match[1], match[2]) for match in _RAIL.finditer(body)}
    # Rails close the line, so a line that ends otherwise has lost its end.
    if not rails or not _RAIL.fullmatch(" ".join(body.split(" ")[-2:])):
        raise SourceError(NAME, f"no rails at the end of the line: {body[-40:]!r}", _REMEDY)
    return TegraLine(rails)


def _watts(rail: str, figures: str) -> float:
    match = _FIGURES.fullmatch(figures)
    if not match:
        raise SourceError(NAME, f"rail {rail} reads {figures!r}", _REMEDY)
    return int(match[1] or match[2]) / 1000


def tegrastats_source(output: ChildOutput) -> ToolSource:
    """Return a source of the newest line from a `tegrastats` that runs as a child process."""
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
