"""Draw a plan as SVG or HTML.

Tensors over time, coloured by their fate, above memory and the budget line.
"""

import enum
import html
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner.ir.bundle.bundle import Bundle
from planner.ir.costs import CostTable
from planner.ir.errors import ExitCode, PortError
from planner.ir.graph import Role, StepGraph
from planner.ir.lowering.lower import lower
from planner.ir.plan import Action, Decision, Plan
from planner.ir.program import Program
from planner.ir.units import format_bytes, format_joules, format_seconds


class DrawError(PortError):
    """A drawing that cannot be made here."""

    exit_code = ExitCode.IMPOSSIBLE


class Shade(enum.Enum):
    """What happens to a tensor for a while; the value is its colour."""

    KEEP = "#5b8db8"
    RECOMPUTE = "#e09f3e"
    PAGE_OUT = "#9e2a2b"
    PAGE_IN = "#4f772d"
    PACKED = "#a5a5d6"


_RETURNS = {Action.PAGE: Shade.PAGE_IN, Action.RECOMPUTE: Shade.RECOMPUTE, Action.PACK: Shade.KEEP}
"""How a tensor that comes back is drawn."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One tensor resident from op `start` to op `stop` (exclusive)."""

    lane: int
    start: int
    stop: int
    shade: Shade


@dataclass(frozen=True)
class Drawing:
    """What to draw: lanes (tensor names and bytes), bars, memory per op, seconds at which each op starts."""

    lanes: tuple[tuple[str, int], ...]
    bars: tuple[Bar, ...]
    memory: tuple[int, ...]
    moments: tuple[float, ...]
    budget_bytes: int
    title: str


def bundle_drawing(bundle: Bundle, index: int) -> Drawing:
    """Return the drawing of a bundle's plan for its main graph, with the budget that it was asked for."""
    main = bundle.manifest.main_graph
    picture = drawing(bundle.graphs[main], bundle.costs[main], bundle.plans[index][main])
    return replace(picture, budget_bytes=bundle.manifest.plans[index].ram_bytes)


def drawing(graph: StepGraph, costs: CostTable, plan: Plan, *, most: int = 120) -> Drawing:
    """Return the drawing of `plan`, with the `most` largest tensors that live through more than one op."""
    program = lower(graph, costs, plan)
    ordered = program.graph
    order = plan.order or tuple(range(len(graph.ops)))
    moments, clock = [], 0.0
    for i in order:
        moments.append(clock)
        clock += costs.ops[i].seconds
    chosen = sorted(
        (s for s, uses in enumerate(ordered.uses) if len(uses) > 1),
        key=lambda s: -ordered.storages[s].nbytes,
    )[:most]
    chosen.sort(key=lambda s: ordered.uses[s][0])
    decisions: dict[int, list[Decision]] = defaultdict(list)
    for d in plan.decisions:
        decisions[d.storage].append(d)
    bars: list[Bar] = []
    for lane, s in enumerate(chosen):
        bars += _bars(ordered, lane, s, decisions[s])
    lanes = tuple((ordered.label(s), ordered.storages[s].nbytes) for s in chosen)
    return Drawing(lanes, tuple(bars), program.timeline, (*moments, clock), plan.ram_bytes, _title(program, plan))


def _title(program: Program, plan: Plan) -> str:
    parts = [
        plan.strategy, f"peak {format_bytes(program.peak_bytes)}", format_seconds(program.seconds),
        format_joules(program.joules), f"{format_bytes(program.written_bytes)} written",
    ]  # fmt: skip
    return ", ".join(parts)


def _bars(graph: StepGraph, lane: int, s: int, decisions: list[Decision]) -> list[Bar]:
    """Return when storage `s` is resident: from each return to the next leave."""
    n, uses = len(graph.ops), graph.uses[s]
    temporary = graph.storages[s].role is Role.TEMPORARY
    start, stop = (uses[0], uses[-1] + 1) if temporary else (0, n)
    found: list[Bar] = []
    gaps = sorted((d for d in decisions if d.action is not Action.INTERMEDIATE), key=lambda d: d.after)
    shade = Shade.KEEP
    wrapping = next((d for d in gaps if d.before <= d.after), None)
    if wrapping is not None:
        start, shade = wrapping.before, Shade.PAGE_IN
    for d in gaps:
        leaving = Shade.PAGE_OUT if d.action is Action.PAGE else shade
        if d.action is Action.PACK:
            found.append(Bar(lane, d.after + 1, d.before, Shade.PACKED))
        end = d.after + 1
        if end > start:
            found += _split(lane, start, end, shade, leaving)
        if d is wrapping:
            start = stop
            break
        start, shade = d.before, _RETURNS[d.action]
    if start < stop:
        found.append(Bar(lane, start, stop, shade))
    found += [Bar(lane, d.before, d.before + 1, Shade.RECOMPUTE) for d in decisions if d.action is Action.INTERMEDIATE]
    return found


def _split(lane: int, start: int, end: int, shade: Shade, leaving: Shade) -> list[Bar]:
    """A tensor that leaves to flash ends in a stretch of the page-out colour."""
    if leaving is not Shade.PAGE_OUT:
        return [Bar(lane, start, end, shade)]
    middle = max(start, end - max((end - start) // 3, 1))
    return [b for b in (Bar(lane, start, middle, shade), Bar(lane, middle, end, leaving)) if b.stop > b.start]


_WIDTH, _LEFT, _LANE, _CURVE = 1100, 190, 7, 180


def svg(picture: Drawing) -> str:
    """Return the drawing as an SVG document."""
    height = 40 + _LANE * len(picture.lanes) + 30 + _CURVE + 40
    total = picture.moments[-1] or 1.0

    def x(op: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - 20) * picture.moments[min(op, len(picture.moments) - 1)] / total

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="16" font-size="13">{html.escape(picture.title)}</text>',
    ]
    for k, shade in enumerate(Shade):
        name = shade.name.lower().replace("_", " ")
        parts.append(f'<rect x="{_LEFT + 110 * k}" y="22" width="10" height="10" fill="{shade.value}"/>')
        parts.append(f'<text x="{_LEFT + 14 + 110 * k}" y="31" font-size="10">{name}</text>')
    for lane, (name, nbytes) in enumerate(picture.lanes):
        y = 40 + _LANE * lane
        label = f"{name[-26:]} {format_bytes(nbytes)}"
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + _LANE - 1}" font-size="6" text-anchor="end">{html.escape(label)}</text>'
        )
    for bar in picture.bars:
        left, y = x(bar.start), 40 + _LANE * bar.lane
        width = max(x(bar.stop) - left, 0.8)
        parts.append(
            f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_LANE - 1}" fill="{bar.shade.value}"/>'
        )
    parts += _curve(picture, x, 40 + _LANE * len(picture.lanes) + 30)
    return "\n".join([*parts, "</svg>", ""])


def _curve(picture: Drawing, x: Callable[[int], float], top: int) -> list[str]:
    if not picture.memory:
        return []
    most = max(*picture.memory, picture.budget_bytes) * 1.05

    def y(nbytes: float) -> float:
        return top + _CURVE * (1 - nbytes / most)

    points = []
    for op, nbytes in enumerate(picture.memory):
        points += [f"{x(op):.1f},{y(nbytes):.1f}", f"{x(op + 1):.1f},{y(nbytes):.1f}"]
    right = x(len(picture.memory))
    area = f"{x(0):.1f},{y(0):.1f} " + " ".join(points) + f" {right:.1f},{y(0):.1f}"
    parts = [f'<polygon points="{area}" fill="{Shade.KEEP.value}" fill-opacity="0.35" stroke="none"/>']
    if picture.budget_bytes:
        line = y(picture.budget_bytes)
        parts.append(
            f'<line x1="{_LEFT}" y1="{line:.1f}" x2="{right:.1f}" y2="{line:.1f}" stroke="#9e2a2b" stroke-dasharray="6 3"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{line + 4:.1f}" font-size="10" text-anchor="end">'
            f"budget {format_bytes(picture.budget_bytes)}</text>"
        )
    seconds = format_seconds(picture.moments[-1])
    parts.append(
        f'<text x="{_LEFT - 6}" y="{y(0):.1f}" font-size="10" text-anchor="end">0</text>'
        f'<text x="{right:.1f}" y="{y(0) + 14:.1f}" font-size="10" text-anchor="end">{seconds} of compute</text>'
    )
    return parts


@dataclass(frozen=True, slots=True)
class Mark:
    """One plan of a frontier: its number in the bundle, peak bytes, seconds and joules per step."""

    number: int
    peak_bytes: int
    seconds: float
    joules: float


_PLOT_WIDTH, _PLOT_HEIGHT, _MARGIN = 620, 320, 70


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

    right, bottom = _PLOT_WIDTH - _MARGIN, _PLOT_HEIGHT - _MARGIN
    spots = [(place(m.peak_bytes, xs, _MARGIN, right), place(m.joules, ys, bottom, 40)) for m in marks]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_PLOT_WIDTH} {_PLOT_HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{_PLOT_WIDTH}" height="{_PLOT_HEIGHT}" fill="white"/>',
        f'<text x="{_MARGIN}" y="20" font-size="13">plans: joules per step over peak memory; a larger circle is slower</text>',
        f'<line x1="{_MARGIN}" y1="{bottom + 12}" x2="{right}" y2="{bottom + 12}" stroke="#888"/>',
        f'<text x="{_MARGIN}" y="{bottom + 28}">{format_bytes(min(xs))}</text>',
        f'<text x="{right}" y="{bottom + 28}" text-anchor="end">{format_bytes(max(xs))}</text>',
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(spots))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{Shade.KEEP.value}" stroke-dasharray="4 3"/>')
    for m, (x, y) in zip(marks, spots, strict=True):
        fill = Shade.PAGE_OUT.value if m.number == chosen else "white"
        label = f"{m.number}: {format_joules(m.joules)}, {format_seconds(m.seconds)}, {format_bytes(m.peak_bytes)}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 + 6 * (m.seconds / slowest) ** 0.5:.1f}" fill="{fill}" '
            f'stroke="{Shade.PAGE_OUT.value}"><title>{html.escape(label)}</title></circle>'
        )
        parts.append(f'<text x="{x:.1f}" y="{y - 13:.1f}" text-anchor="middle">{html.escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def page(picture: Drawing, marks: Sequence[Mark] = (), chosen: int = 0) -> str:
    """Return an HTML page with the drawing in it, and the frontier of `marks` where there is one."""
    plot = f'<div style="max-width:40rem">{frontier_svg(marks, chosen)}</div>' if len(marks) > 1 else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>plan</title>'
        "<style>body{margin:1rem;font-family:sans-serif}svg{width:100%;height:auto}</style></head><body>"
        f"{svg(picture)}{plot}</body></html>\n"
    )


def write_drawing(picture: Drawing, path: Path, marks: Sequence[Mark] = (), chosen: int = 0) -> None:
    """Write the drawing as the suffix of `path` says; an .html page shows the frontier too.

    Raises DrawError for another suffix, and where the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix == ".svg":
        text = svg(picture)
    elif suffix in (".html", ".htm"):
        text = page(picture, marks, chosen)
    else:
        raise DrawError(f"cannot draw to {path}; name a file that ends in .svg or .html")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DrawError(f"cannot write {path}: {error.strerror}; name a file that can be written") from error
