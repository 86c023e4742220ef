"""A drawing of a plan as SVG that follows the reader's light or dark theme, with tooltips."""

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from port_planner.base.units import format_bytes, format_seconds
from port_planner.draw.drawing import Bar, Drawing, Shade

STYLE = """
.plan{--paper:#fff;--ink:#1d2733;--faint:#68788a;--rule:#dde3ea;--band:#f4f6f9;--kept:#5b8db8;--recompute:#e09f3e;--page_out:#b23a48;
--page_in:#4f8a3d;--packed:#9388cf;--piece:#1b8a8f;--process:#aab7c4;font-family:system-ui,sans-serif;font-size:11px;fill:var(--ink);background:var(--paper)}
@media (prefers-color-scheme:dark){.plan{--paper:#14181d;--ink:#dfe6ee;--faint:#8b9bab;--rule:#2b333c;--band:#1b2128;--kept:#5e97c9;
--recompute:#e3aa55;--page_out:#d8616c;--page_in:#74b35f;--packed:#a49ae0;--piece:#4fc0c4;--process:#46525e}}
.plan .faint{fill:var(--faint)}.plan .rule{stroke:var(--rule)}.plan .band{fill:var(--band)}.plan .KEEP{fill:var(--kept)}
.plan .RECOMPUTE{fill:var(--recompute)}.plan .PAGE_OUT{fill:var(--page_out)}.plan .PAGE_IN{fill:var(--page_in)}.plan .PACKED{fill:var(--packed)}
.plan .process{fill:var(--process)}.plan .piece{fill:var(--piece)}.plan .budget{stroke:var(--page_out);stroke-dasharray:6 3}.plan .lane:hover text{font-weight:600}
.plan .lane:hover .row{fill:var(--rule)}.plan .row{fill:transparent}
""".replace("\n", "")

_CHART, _LANE, _CURVE = 860, 14, 190
"""Pixels: the width of the step, the height of a tensor's lane and of the curve of memory."""
_LINE = 12
"""Pixels from one line of words to the next."""
_LETTER = 6.3
"""Pixels of a letter of the labels, about."""
_MIN_LEFT, _RIGHT, _TOP, _AXIS = 130, 24, 74, 44
_MIN_BAR = 0.8
_RUN, _PALER = 5, 0.45
"""Tile markers on the axis: height in pixels, and opacity of every second one."""
TILED = "operators in pieces"
_TICKS = 6
_PHASE_LETTERS = 8
_MIN_SPAN = 20
"""Updates between operators of the backward pass over fewer operators get no band of their own."""


def svg(picture: Drawing, *, titled: bool = True) -> str:
    """Return the drawing as an SVG document."""
    return "\n".join(_Svg(picture, titled).document())


@dataclass(frozen=True)
class _Svg:
    picture: Drawing
    titled: bool

    @cached_property
    def left(self) -> float:
        labels = [len(_label(name, nbytes)) for name, nbytes in self.picture.lanes]
        return max(_MIN_LEFT, max(labels, default=0) * _LETTER + 12)

    @property
    def lanes_top(self) -> float:
        return _TOP + _CURVE + _AXIS

    @property
    def most(self) -> float:
        return max(*self.picture.memory, self.picture.budget_bytes, 1) * 1.05

    def x(self, op: int) -> float:
        """Return where an op starts."""
        moments = self.picture.moments
        return self.left + _CHART * moments[min(op, len(moments) - 1)] / (moments[-1] or 1.0)

    def y(self, nbytes: float) -> float:
        """Return the height of a number of bytes in the curve."""
        return _TOP + _CURVE * (1 - nbytes / self.most)

    def document(self) -> Iterator[str]:
        width, height = self.left + _CHART + _RIGHT, self.lanes_top + _LANE * len(self.picture.lanes) + 12
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'data-left="{self.left:.1f}" data-chart="{_CHART}"><style>{STYLE}</style>'
        )
        yield f'<rect width="{width:.0f}" height="{height:.0f}" fill="var(--paper)"/>'
        if self.titled:
            yield f'<text x="12" y="22" font-size="14" font-weight="600">{html.escape(self.picture.title)}</text>'
        yield from self._legend()
        yield from self._phases(height)
        yield from self._memory()
        yield from self._axis()
        yield from self._runs()
        yield from self._lanes()
        yield "</svg>\n"

    def _legend(self) -> Iterator[str]:
        at = 12.0
        for shade in Shade:
            yield f'<rect class="{shade.name}" x="{at:.0f}" y="34" width="11" height="11" rx="2"/>'
            yield f'<text x="{at + 16:.0f}" y="43">{shade.value}</text>'
            at += 34 + len(shade.value) * _LETTER
        if self.picture.runs:
            yield f'<rect class="piece" x="{at:.0f}" y="37" width="11" height="{_RUN}"/>'
            yield f'<text x="{at + 16:.0f}" y="43">{TILED}</text>'
            at += 34 + len(TILED) * _LETTER
        if self.picture.unshown:
            yield f'<text class="faint" x="{at:.0f}" y="43">{self.picture.unshown:,} tensors besides are in the memory alone</text>'

    def _phases(self, bottom: float) -> Iterator[str]:
        wide = [span for span in self.picture.phases if self.x(span.stop) - self.x(span.start) > _MIN_SPAN]
        for number, span in enumerate(wide):
            left, right = self.x(span.start), self.x(span.stop)
            if number % 2 == 0:
                yield (
                    f'<rect class="band" x="{left:.1f}" y="{_TOP - 16}" width="{right - left:.1f}" '
                    f'height="{bottom - _TOP + 16:.0f}"/>'
                )
            if right - left > _PHASE_LETTERS * _LETTER:
                yield f'<text class="faint" x="{left + 4:.1f}" y="{_TOP - 5}">{span.name}</text>'

    def _lanes(self) -> Iterator[str]:
        bars: list[list[Bar]] = [[] for _ in self.picture.lanes]
        for bar in self.picture.bars:
            bars[bar.lane].append(bar)
        for lane, (name, nbytes) in enumerate(self.picture.lanes):
            top, label = self.lanes_top + _LANE * lane, _label(name, nbytes)
            yield f'<g class="lane"><rect class="row" x="0" y="{top}" width="{self.left + _CHART:.0f}" height="{_LANE}"/>'
            yield f'<text x="{self.left - 8:.1f}" y="{top + _LANE - 4}" text-anchor="end">{html.escape(label)}</text>'
            for bar in bars[lane]:
                left = self.x(bar.start)
                width = max(self.x(bar.stop) - left, _MIN_BAR)
                yield (
                    f'<rect class="{bar.shade.name}" x="{left:.1f}" y="{top + 2}" width="{width:.1f}" height="{_LANE - 4}" '
                    f'rx="1.5"><title>{html.escape(self._words(bar))}</title></rect>'
                )
            yield "</g>"

    def _words(self, bar: Bar) -> str:
        name, nbytes = self.picture.lanes[bar.lane]
        first, last = bar.start, min(bar.stop, len(self.picture.memory)) - 1
        return (
            f"{name}: {format_bytes(nbytes)} {bar.shade.value}\n"
            f"from {self._operator(first)} to {self._operator(last)}, {format_seconds(self.picture.moments[first])} to "
            f"{format_seconds(self.picture.moments[min(bar.stop, len(self.picture.moments) - 1)])}"
        )

    def _operator(self, op: int) -> str:
        names = self.picture.operators
        return f"operator {op}" + (f" ({names[op]})" if op < len(names) else "")

    def _memory(self) -> Iterator[str]:
        picture = self.picture
        yield (
            f'<text class="faint" x="{self.left - 8:.1f}" y="{_TOP - 5:.0f}" text-anchor="end">resident memory</text>'
        )
        if not picture.memory:
            return
        right = self.x(len(picture.memory))
        points = []
        for op, nbytes in enumerate(picture.memory):
            points += [f"{self.x(op):.1f},{self.y(nbytes):.1f}", f"{self.x(op + 1):.1f},{self.y(nbytes):.1f}"]
        area = f"{self.left:.1f},{self.y(0):.1f} {' '.join(points)} {right:.1f},{self.y(0):.1f}"
        yield f'<polygon class="KEEP" points="{area}" fill-opacity="0.45"/>'
        base = picture.base_bytes
        if base:
            top = self.y(base)
            yield (
                f'<rect class="process" x="{self.left:.1f}" y="{top:.1f}" width="{right - self.left:.1f}" '
                f'height="{self.y(0) - top:.1f}"><title>{format_bytes(base)}: the process itself</title></rect>'
            )
            line = self.y(picture.budget_bytes) if picture.budget_bytes else 0.0
            at = max(top, line + _LINE) if top >= line else top  # below the budget's words
            yield f'<text class="faint" x="{self.left - 8:.1f}" y="{at + 4:.1f}" text-anchor="end">process {format_bytes(base)}</text>'
        fullest = max(range(len(picture.memory)), key=lambda op: picture.memory[op])
        peak = picture.memory[fullest]
        at = self.x(fullest)
        yield (
            f'<circle cx="{at:.1f}" cy="{self.y(peak):.1f}" r="3" fill="var(--ink)"><title>peak {format_bytes(peak)} at '
            f"{html.escape(self._operator(fullest))}</title></circle>"
        )
        if picture.budget_bytes and picture.budget_bytes < 2 * peak:
            line = self.y(picture.budget_bytes)
            yield f'<line class="budget" x1="{self.left:.1f}" y1="{line:.1f}" x2="{right:.1f}" y2="{line:.1f}"/>'
            label = f"budget {format_bytes(picture.budget_bytes)}"
            yield f'<text x="{self.left - 8:.1f}" y="{line + 4:.1f}" text-anchor="end">{label}</text>'

    def _runs(self) -> Iterator[str]:
        """Yield a block on the axis for each tile of a chain, every second one paler."""
        for run in self.picture.runs:
            left, tile = self.x(run.start), run.tile
            width = max(self.x(run.stop) - left, _MIN_BAR)
            words = (
                f"{tile.what}: piece {tile.index + 1} of {tile.count}{', summed in another order' if tile.reordered else ''}\n"
                f"from {self._operator(run.start)} to {self._operator(run.stop - 1)}"
            )
            yield (
                f'<rect class="piece" x="{left:.1f}" y="{_TOP + _CURVE + 1}" width="{width:.1f}" height="{_RUN}" '
                f'fill-opacity="{1 if tile.index % 2 == 0 else _PALER}"><title>{html.escape(words)}</title></rect>'
            )

    def _axis(self) -> Iterator[str]:
        total, bottom = self.picture.moments[-1], _TOP + _CURVE
        yield f'<line class="rule" x1="{self.left:.1f}" y1="{bottom:.1f}" x2="{self.left + _CHART:.1f}" y2="{bottom:.1f}"/>'
        step = _round_step(total / _TICKS)
        for k in range(int(total / step) + 1 if step else 1):
            at = self.left + _CHART * k * step / (total or 1.0)
            yield f'<text class="faint" x="{at:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{format_seconds(k * step)}</text>'
        yield (
            f'<text class="faint" x="{self.left + _CHART:.1f}" y="{bottom + 32:.1f}" text-anchor="end">'
            f"{len(self.picture.memory):,} operators, {format_seconds(total)} of computing once</text>"
        )


def _label(name: str, nbytes: int) -> str:
    return f"{name}  {format_bytes(nbytes)}"


def _round_step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least `least`; 0 for 0."""
    if least <= 0:
        return 0.0
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
