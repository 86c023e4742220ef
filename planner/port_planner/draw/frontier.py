"""The plans of a bundle side by side: energy over memory."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from port_planner.base.units import format_bytes, format_joules, format_seconds
from port_planner.draw.svg import STYLE


@dataclass(frozen=True, slots=True)
class Mark:
    """One plan of a frontier: its number in the bundle, peak bytes, seconds and joules per step."""

    number: int
    peak_bytes: int
    seconds: float
    joules: float


_WIDTH, _HEIGHT, _MARGIN = 620, 320, 90


def frontier_svg(marks: Sequence[Mark], chosen: int) -> str:
    """Return an SVG of energy over memory, one circle per plan.

    A circle's area is the plan's seconds; `chosen` is filled.
    """
    xs, ys = [m.peak_bytes for m in marks], [m.joules for m in marks]
    slowest = max(m.seconds for m in marks) or 1.0

    def place(value: float, values: list[int] | list[float], start: float, stop: float) -> float:
        low, high = min(values), max(values)
        share = (value - low) / (high - low) if high > low else 0.5
        return start + (stop - start) * share

    right, bottom = _WIDTH - _MARGIN, _HEIGHT - _MARGIN
    spots = [(place(m.peak_bytes, xs, _MARGIN, right), place(m.joules, ys, bottom, 60)) for m in marks]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" viewBox="0 0 {_WIDTH} {_HEIGHT}"><style>{STYLE}</style>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="var(--paper)"/>',
        '<text x="12" y="22" font-size="14" font-weight="600">the bundle\'s plans</text>',
        '<text class="faint" x="12" y="38">joules of a step over its peak of memory; a larger circle is slower</text>',
        f'<line class="rule" x1="{_MARGIN}" y1="{bottom + 22}" x2="{right}" y2="{bottom + 22}"/>',
        f'<text class="faint" x="{_MARGIN}" y="{bottom + 38}" text-anchor="middle">{format_bytes(min(xs))}</text>',
        f'<text class="faint" x="{right}" y="{bottom + 38}" text-anchor="middle">{format_bytes(max(xs))}</text>',
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(spots))
    parts.append(f'<polyline points="{line}" fill="none" stroke="var(--kept)" stroke-dasharray="4 3"/>')
    for m, (x, y) in zip(marks, spots, strict=True):
        fill = "var(--kept)" if m.number == chosen else "var(--paper)"
        words = (
            f"plan {m.number + 1}: {format_joules(m.joules)}, {format_seconds(m.seconds)}, {format_bytes(m.peak_bytes)}"
        )
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 + 6 * (m.seconds / slowest) ** 0.5:.1f}" fill="{fill}" '
            f'stroke="var(--kept)"><title>{html.escape(words)}</title></circle>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{y - 14:.1f}" text-anchor="middle">{format_joules(m.joules)}, '
            f"{format_seconds(m.seconds)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])
