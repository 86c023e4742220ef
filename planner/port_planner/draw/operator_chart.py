"""A step's operators as a plot: time per call over the memory it touches."""

import html
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from port_planner.base.units import format_bytes, format_seconds
from port_planner.draw.svg import STYLE
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph


@dataclass(frozen=True, slots=True)
class Spot:
    """Calls of one operator that touch the same number of bytes, workspace included: their
    number, and their total seconds.
    """

    name: str
    tiled: bool
    nbytes: int
    calls: int
    seconds: float


def spots_of(graph: StepGraph, costs: CostTable) -> list[Spot]:
    """Return the calls of a step, with equal ones merged, and those with the largest total time last."""
    found: dict[tuple[str, bool, int], list[float]] = defaultdict(list)
    for i, (op, cost) in enumerate(zip(graph.ops, costs.ops, strict=True)):
        touched = sum(graph.storages[s].nbytes for s in {*graph.reads[i], *graph.creates[i]}) + cost.workspace_bytes
        found[op.name.removeprefix("aten::"), op.tile is not None, touched].append(cost.seconds)
    spots = [Spot(*key, len(seconds), sum(seconds)) for key, seconds in found.items()]
    return sorted(spots, key=lambda spot: (spot.seconds, spot.name))


_WIDTH, _HEIGHT, _LEFT, _TOP, _MARGIN = 900, 480, 90, 74, 44
_RADIUS = 3, 15
"""Radii in pixels of the smallest spot and of one that takes all of the step's time; areas are proportional to time."""
_NAMED, _APART = 12, 14
"""Number of longest-running spots that are labelled, and pixels that must separate two labels."""
_MIN_BYTES, _MIN_S = 1024, 1e-6
_BYTES_STEP, _SECONDS_STEP = 32, 10
"""Factor between two grid lines."""
_SHORT_S = 1e-3


def operators_svg(spots: Sequence[Spot], title: str) -> str:
    """Return an SVG of seconds of a call over bytes that it touches, on logarithmic scales; areas are
    shares of the step's time.
    """
    total = sum(spot.seconds for spot in spots) or 1.0
    xs = _Scale.around([max(spot.nbytes, _MIN_BYTES) for spot in spots], _BYTES_STEP)
    ys = _Scale.around([max(spot.seconds / spot.calls, _MIN_S) for spot in spots], _SECONDS_STEP)
    right, bottom = _WIDTH - _MARGIN, _HEIGHT - _MARGIN

    def x(nbytes: float) -> float:
        return _LEFT + (right - _LEFT) * xs.share(max(nbytes, _MIN_BYTES))

    def y(seconds: float) -> float:
        return bottom - (bottom - _TOP) * ys.share(max(seconds, _MIN_S))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" viewBox="0 0 {_WIDTH} {_HEIGHT}"><style>{STYLE}</style>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="var(--paper)"/>',
        f'<text x="12" y="22" font-size="14" font-weight="600">{html.escape(title)}</text>',
        '<rect class="KEEP" x="12" y="34" width="11" height="11" rx="2"/><text x="28" y="43">whole</text><rect '
        'class="tile" x="74" y="34" width="11" height="11" rx="2"/><text x="90" y="43">in tiles</text><text '
        'class="faint" x="152" y="43">seconds of a call over the memory it touches; areas are shares of the '
        "step</text>",
    ]
    for seconds in ys.lines:
        at = y(seconds)
        parts.append(f'<line class="rule" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        label = f"{seconds * 1e6:.0f} us" if seconds < _SHORT_S else format_seconds(seconds)
        parts.append(f'<text class="faint" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for nbytes in xs.lines:
        at = x(nbytes)
        parts.append(f'<line class="rule" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>')
        label = format_bytes(int(nbytes))
        parts.append(f'<text class="faint" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    named: list[float] = []
    for spot in reversed(spots):  # small ones stay within reach of the pointer
        each, share = spot.seconds / spot.calls, spot.seconds / total
        calls = "1 call" if spot.calls == 1 else f"{spot.calls:,} calls"
        words = (
            f"{spot.name}{' in tiles' if spot.tiled else ''}: {calls} of {format_seconds(each)}, {share:.1%} of the "
            f"step, {format_bytes(spot.nbytes)} each"
        )
        kind, radius = ("tile" if spot.tiled else "KEEP"), _RADIUS[0] + (_RADIUS[1] - _RADIUS[0]) * share**0.5
        left, top = x(spot.nbytes), y(each)
        parts.append(
            f'<circle class="{kind}" cx="{left:.1f}" cy="{top:.1f}" r="{radius:.1f}" fill-opacity="0.6">'
            f"<title>{html.escape(words)}</title></circle>"
        )
        if len(named) < _NAMED and all(abs(top - other) >= _APART for other in named):
            named.append(top)
            anchor, beside = ("end", -radius - 3) if left > _WIDTH / 2 else ("start", radius + 3)
            parts.append(
                f'<text x="{left + beside:.1f}" y="{top + 4:.1f}" text-anchor="{anchor}" '
                f'pointer-events="none">{html.escape(spot.name)}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True, slots=True)
class _Scale:
    """A logarithmic scale, with a line at each power of its step."""

    lines: tuple[float, ...]

    @classmethod
    def around(cls, values: Sequence[float], step: int) -> "_Scale":
        """Return the scale with lines at powers of `step` around these values."""
        low = math.floor(math.log(min(values, default=1.0), step))
        high = math.ceil(math.log(max(values, default=1.0), step))
        return cls(tuple(float(step) ** power for power in range(low, max(high, low + 1) + 1)))

    def share(self, value: float) -> float:
        """Return the position of a value between the first line (0) and the last (1)."""
        return math.log(value / self.lines[0]) / math.log(self.lines[-1] / self.lines[0])
