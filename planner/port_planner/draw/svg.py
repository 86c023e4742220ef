"""A drawing of a plan as SVG that follows the reader's light or dark theme, with tooltips; for
wide and for narrow screens.
"""

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from port_planner.base.units import format_bytes, format_seconds
from port_planner.draw.drawing import Bar, Drawing, Shade

STYLE = """
.plan{--paper:#fff;--ink:#1d2733;--faint:#68788a;--rule:#dde3ea;--band:#f4f6f9;--kept:#5b8db8;--recompute:#e09f3e;--page_out:#b23a48;
--page_in:#4f8a3d;--packed:#9388cf;--tile:#1b8a8f;--process:#aab7c4;font-family:system-ui,sans-serif;font-size:11px;fill:var(--ink);background:var(--paper)}
@media (prefers-color-scheme:dark){.plan{--paper:#14181d;--ink:#dfe6ee;--faint:#8b9bab;--rule:#2b333c;--band:#1b2128;--kept:#5e97c9;
--recompute:#e3aa55;--page_out:#d8616c;--page_in:#74b35f;--packed:#a49ae0;--tile:#4fc0c4;--process:#46525e}}
.plan .faint{fill:var(--faint)}.plan .rule{stroke:var(--rule)}.plan .band{fill:var(--band)}.plan .KEEP{fill:var(--kept)}
.plan .RECOMPUTE{fill:var(--recompute)}.plan .PAGE_OUT{fill:var(--page_out)}.plan .PAGE_IN{fill:var(--page_in)}.plan .PACKED{fill:var(--packed)}
.plan .process{fill:var(--process)}.plan .tile{fill:var(--tile)}.plan .budget{stroke:var(--page_out);stroke-dasharray:6 3}.plan .lane:hover text{font-weight:600}
.plan .lane:hover .row{fill:var(--rule)}.plan .row{fill:transparent}
""".replace("\n", "")

_CHART, _NARROW_CHART, _BAR, _CURVE = 860, 340, 14, 190
"""Pixels: the width of the step, its width on a narrow screen, the height of a tensor's bar,
and of the curve of memory.
"""
_LINE = 12
"""Pixels from one line of words to the next."""
_LETTER = 6.3
"""Approximate pixels of a letter in the labels."""
_MIN_LEFT, _MARGIN, _RIGHT, _TOP, _AXIS = 130, 12, 24, 74, 44
_MIN_BAR = 0.8
_RUN, _PALER = 5, 0.45
"""Tile markers on the axis: height in pixels, and opacity of every second one."""
TILED = "operators in tiles"
_TICKS = 6
_PHASE_LETTERS = 8
_MIN_SPAN = 20
"""Least number of operators in a span: updates between shorter spans of the backward pass have no band of their own."""


def svg(picture: Drawing, *, titled: bool = True, narrow: bool = False) -> str:
    """Return the drawing as an SVG document; a `narrow` one has its labels above what they name, and fits a phone."""
    return "\n".join(_Svg(picture, titled, narrow).document())


@dataclass(frozen=True)
class _Svg:
    picture: Drawing
    titled: bool
    narrow: bool

    @property
    def chart(self) -> int:
        return _NARROW_CHART if self.narrow else _CHART

    @property
    def lane(self) -> int:
        return 2 * _BAR if self.narrow else _BAR

    @cached_property
    def left(self) -> float:
        if self.narrow:
            return _MARGIN + 8  # half of the axis' first words
        labels = [len(_label(name, nbytes)) for name, nbytes in self.picture.lanes]
        return max(_MIN_LEFT, max(labels, default=0) * _LETTER + 12)

    @cached_property
    def legend(self) -> list[tuple[str, str, float, float]]:
        """Class and words of each entry, with the left and top of its mark, in as many lines as the width needs."""
        entries = [(shade.name, shade.value) for shade in Shade]
        if self.picture.runs:
            entries.append(("tile", TILED))
        if self.picture.unshown:
            entries.append(("", f"{self.picture.unshown:,} further tensors count only in the curve"))
        placed, at, top = [], float(_MARGIN), 34.0
        for name, words in entries:
            width = 34 + len(words) * _LETTER
            if at > _MARGIN and at + width > self.left + self.chart + _RIGHT:
                at, top = float(_MARGIN), top + _LINE + 4
            placed.append((name, words, at, top))
            at += width
        return placed

    @property
    def top(self) -> float:
        return _TOP + self.legend[-1][3] - self.legend[0][3]

    @property
    def lanes_top(self) -> float:
        return self.top + _CURVE + _AXIS

    @property
    def most(self) -> float:
        return max(*self.picture.memory, self.picture.budget_bytes, 1) * 1.05

    def x(self, op: int) -> float:
        """Return where an op starts."""
        moments = self.picture.moments
        return self.left + self.chart * moments[min(op, len(moments) - 1)] / (moments[-1] or 1.0)

    def y(self, nbytes: float) -> float:
        """Return the height of a number of bytes in the curve."""
        return self.top + _CURVE * (1 - nbytes / self.most)

    def document(self) -> Iterator[str]:
        width, height = self.left + self.chart + _RIGHT, self.lanes_top + self.lane * len(self.picture.lanes) + 12
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'data-left="{self.left:.1f}" data-chart="{self.chart}"><style>{STYLE}</style>'
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
        for name, words, at, top in self.legend:
            if name == "tile":
                yield f'<rect class="tile" x="{at:.0f}" y="{top + 3:.0f}" width="11" height="{_RUN}"/>'
            elif name:
                yield f'<rect class="{name}" x="{at:.0f}" y="{top:.0f}" width="11" height="11" rx="2"/>'
            style, left = ("", at + 16) if name else ('class="faint" ', at)
            yield f'<text {style}x="{left:.0f}" y="{top + 9:.0f}">{words}</text>'

    def _line_label(self, words: str, at: float, style: str = "") -> str:
        """Return the label of a line at height `at`: left of the chart, or, if narrow, above the line."""
        left, top, anchor = (self.left + 4, at - 4, "start") if self.narrow else (self.left - 8, at + 4, "end")
        return f'<text {style}x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{words}</text>'

    def _phases(self, bottom: float) -> Iterator[str]:
        wide = [span for span in self.picture.phases if self.x(span.stop) - self.x(span.start) > _MIN_SPAN]
        for number, span in enumerate(wide):
            left, right = self.x(span.start), self.x(span.stop)
            if number % 2 == 0:
                yield (
                    f'<rect class="band" x="{left:.1f}" y="{self.top - 16}" width="{right - left:.1f}" '
                    f'height="{bottom - self.top + 16:.0f}"/>'
                )
            if right - left > _PHASE_LETTERS * _LETTER:
                yield f'<text class="faint" x="{left + 4:.1f}" y="{self.top - 5}">{span.name}</text>'

    def _lanes(self) -> Iterator[str]:
        bars: list[list[Bar]] = [[] for _ in self.picture.lanes]
        for bar in self.picture.bars:
            bars[bar.lane].append(bar)
        for lane, (name, nbytes) in enumerate(self.picture.lanes):
            row = self.lanes_top + self.lane * lane
            top = row + self.lane - _BAR
            yield f'<g class="lane"><rect class="row" x="0" y="{row}" width="{self.left + self.chart:.0f}" height="{self.lane}"/>'
            yield self._line_label(html.escape(_label(name, nbytes)), top + (4 if self.narrow else _BAR - 8))
            for bar in bars[lane]:
                left = self.x(bar.start)
                width = max(self.x(bar.stop) - left, _MIN_BAR)
                yield (
                    f'<rect class="{bar.shade.name}" x="{left:.1f}" y="{top + 2}" width="{width:.1f}" '
                    f'height="{_BAR - 4}" rx="1.5"><title>{html.escape(self._words(bar))}</title></rect>'
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
        if not self.narrow:
            yield self._line_label("resident memory", self.top - 9, 'class="faint" ')
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
            yield self._line_label(f"process {format_bytes(base)}", at, 'class="faint" ')
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
            yield self._line_label(f"budget {format_bytes(picture.budget_bytes)}", line)

    def _runs(self) -> Iterator[str]:
        """Yield a block on the axis for each tile of a chain, every second one paler."""
        for run in self.picture.runs:
            left, tile = self.x(run.start), run.tile
            width = max(self.x(run.stop) - left, _MIN_BAR)
            words = (
                f"{tile.what}: tile {tile.index + 1} of "
                f"{tile.count}{', summed in another order' if tile.reordered else ''}\n"
                f"from {self._operator(run.start)} to {self._operator(run.stop - 1)}"
            )
            yield (
                f'<rect class="tile" x="{left:.1f}" y="{self.top + _CURVE + 1}" width="{width:.1f}" height="{_RUN}" '
                f'fill-opacity="{1 if tile.index % 2 == 0 else _PALER}"><title>{html.escape(words)}</title></rect>'
            )

    def _axis(self) -> Iterator[str]:
        total, bottom = self.picture.moments[-1], self.top + _CURVE
        yield f'<line class="rule" x1="{self.left:.1f}" y1="{bottom:.1f}" x2="{self.left + self.chart:.1f}" y2="{bottom:.1f}"/>'
        step = _round_step(total / _TICKS)
        for k in range(int(total / step) + 1 if step else 1):
            at = self.left + self.chart * k * step / (total or 1.0)
            yield f'<text class="faint" x="{at:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{format_seconds(k * step)}</text>'
        yield (
            f'<text class="faint" x="{self.left + self.chart:.1f}" y="{bottom + 32:.1f}" text-anchor="end">'
            f"{len(self.picture.memory):,} operators, {format_seconds(total)} of computation</text>"
        )


def _label(name: str, nbytes: int) -> str:
    return f"{name}  {format_bytes(nbytes)}"


def _round_step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least `least`; 0 for 0."""
    if least <= 0:
        return 0.0
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
