"""The rounds of a federation as a plot: the loss, and which devices took part."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from port_planner.base.units import format_seconds
from port_planner.draw.svg import STYLE


@dataclass(frozen=True, slots=True)
class RoundMark:
    """One round or attempt. An `abandoned` one gives the reason, and has no loss and no devices."""

    number: int
    seconds: float
    loss: float | None
    devices: tuple[str, ...]
    """Devices in the average."""
    lost: dict[str, str]
    """The devices that were asked but are missing, with the reasons."""
    abandoned: str = ""


_WIDTH, _LEFT, _RIGHT, _TOP, _CURVE, _ROW = 900, 130, 24, 56, 200, 20
_DOT = 5.0
"""Largest radius of a device's dot, in pixels."""
_MAX_LABELS = 20
"""Largest number of rounds that are labelled with their number."""


def rounds_svg(rounds: Sequence[RoundMark], title: str) -> str:
    """Return an SVG of the loss per round, with a row per device below: a dot if it is in the
    average, a ring if it was lost.
    """
    names = sorted({name for one in rounds for name in (*one.devices, *one.lost)})
    losses = [one.loss for one in rounds if one.loss is not None]
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    bottom, step = _TOP + _CURVE, (_WIDTH - _LEFT - _RIGHT) / max(1, len(rounds))
    height = bottom + 30 + _ROW * len(names) + 24

    def y(loss: float) -> float:
        return bottom - (_CURVE * (loss - low) / (high - low) if high > low else _CURVE / 2)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" viewBox="0 0 {_WIDTH} {height}"><style>{STYLE}</style>',
        f'<rect width="{_WIDTH}" height="{height}" fill="var(--paper)"/>',
        f'<text x="12" y="22" font-size="14" font-weight="600">{html.escape(title)}</text>',
        '<text class="faint" x="12" y="38">loss by round; a dot: in the average, a ring: asked and not in it, a band: '
        "abandoned</text>",
    ]
    for loss in sorted({low, high}):
        parts.append(f'<line class="rule" x1="{_LEFT}" y1="{y(loss):.1f}" x2="{_WIDTH - _RIGHT}" y2="{y(loss):.1f}"/>')
        parts.append(f'<text class="faint" x="{_LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.4f}</text>')
    for row, name in enumerate(names):
        at = bottom + 34 + _ROW * row
        parts.append(f'<text x="{_LEFT - 8}" y="{at}" text-anchor="end">{html.escape(name)}</text>')
    every = -(-len(rounds) // _MAX_LABELS)
    line = []
    for column, one in enumerate(rounds):
        x = _LEFT + step * (column + 0.5)
        if one.abandoned:
            parts.append(_band(x, step, height - 24, one))
        elif one.loss is not None:
            line.append(f"{x:.1f},{y(one.loss):.1f}")
            words = (
                f"round {one.number}: loss {one.loss:.4f}, {len(one.devices)} devices, {format_seconds(one.seconds)}"
            )
            parts.append(_dot(x, y(one.loss), min(_DOT, step / 3), "var(--kept)", words))
        if column % every == 0:
            parts.append(f'<text class="faint" x="{x:.1f}" y="{height - 8}" text-anchor="middle">{one.number}</text>')
        for row, name in enumerate(names):
            fill = "var(--kept)" if name in one.devices else "none"
            if name in one.devices or name in one.lost:
                words = f"round {one.number}: {name}{f', {one.lost[name]}' if name in one.lost else ''}"
                parts.append(_dot(x, bottom + 30 + _ROW * row, min(_DOT, step / 3), fill, words))
    parts.append(f'<polyline points="{" ".join(line)}" fill="none" stroke="var(--kept)" pointer-events="none"/>')
    return "\n".join([*parts, "</svg>", ""])


def _dot(x: float, y: float, radius: float, fill: str, words: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{fill}" stroke="var(--kept)">'
        f"<title>{html.escape(words)}</title></circle>"
    )


def _band(x: float, width: float, bottom: float, one: RoundMark) -> str:
    words = html.escape(f"round {one.number}: abandoned: {one.abandoned}")
    return (
        f'<rect class="band" x="{x - width / 2:.1f}" y="{_TOP - 8}" width="{width:.1f}" height="{bottom - _TOP:.1f}">'
        f"<title>{words}</title></rect>"
    )
