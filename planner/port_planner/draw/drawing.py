"""The contents of a picture of a plan: tensors over time and what happens to them, memory below
them, and the figures above.
"""

import enum
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from port_planner.base.units import format_bytes, format_joules, format_seconds
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import Role, StepGraph, Tile
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import Program

MAX_LANES = 120
"""Largest number of tensors with a line of their own; the others are only in the curve of memory."""


class Shade(enum.Enum):
    """What happens to a tensor for a while."""

    KEEP = "kept"
    RECOMPUTE = "recomputed"
    PAGE_OUT = "being written to flash"
    PAGE_IN = "read from flash"
    PACKED = "packed"


_RETURNS = {
    Action.PAGE: Shade.PAGE_IN,
    Action.RECOMPUTE: Shade.RECOMPUTE,
    Action.PACK: Shade.KEEP,
    Action.PACK_PAGE: Shade.PAGE_IN,
}
"""Shade in which a returning tensor is drawn, by action."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One tensor resident from op `start` to op `stop` (exclusive)."""

    lane: int
    start: int
    stop: int
    shade: Shade


@dataclass(frozen=True, slots=True)
class Span:
    """Operators `start` to `stop` (exclusive) of one phase."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TileRun:
    """Operators `start` to `stop` (exclusive) that compute one tile of a chain."""

    tile: Tile
    start: int
    stop: int


@dataclass(frozen=True)
class Drawing:
    """The contents of a drawing: lanes (tensor names and bytes), bars, memory per op, and the seconds at which each op
    starts and the last one ends.

    `operators`: their names. `figures`: figures of the plan, by name. `unshown`: tensors without a lane.
    """

    lanes: tuple[tuple[str, int], ...]
    bars: tuple[Bar, ...]
    memory: tuple[int, ...]
    moments: tuple[float, ...]
    budget_bytes: int
    title: str
    operators: tuple[str, ...] = ()
    phases: tuple[Span, ...] = ()
    figures: tuple[tuple[str, str], ...] = ()
    base_bytes: int = 0
    """Memory of the process itself."""
    unshown: int = 0
    runs: tuple[TileRun, ...] = ()
    """The places where operators run in tiles."""


def bundle_drawing(bundle: Bundle, index: int) -> Drawing:
    """Return the drawing of a bundle's plan for its main graph, with the requested budget."""
    main, manifest = bundle.manifest.main_graph, bundle.manifest
    picture = drawing(bundle.graphs[main], bundle.costs[main], bundle.plans[index][main])
    budget = manifest.plans[index].ram_bytes
    figures = (("budget", format_bytes(budget)), *picture.figures)
    title = f"{manifest.name}, plan {index + 1} of {len(manifest.plans)}"
    return replace(picture, budget_bytes=budget, title=title, figures=figures)


def drawing(graph: StepGraph, costs: CostTable, plan: Plan, *, most: int = MAX_LANES) -> Drawing:
    """Return the drawing of `plan`, with the `most` tensors that are largest over time and live
    through more than one op.
    """
    program = lower(graph, costs, plan)
    ordered = program.graph
    order = plan.order or tuple(range(len(graph.ops)))
    moments = tuple(itertools.accumulate((costs.ops[i].seconds for i in order), initial=0.0))

    def held(s: int) -> float:
        """Return byte-seconds between a storage's first and last use."""
        uses = ordered.uses[s]
        return ordered.storages[s].nbytes * (moments[uses[-1] + 1] - moments[uses[0]])

    living = sorted((s for s, uses in enumerate(ordered.uses) if len(uses) > 1), key=held, reverse=True)
    chosen = sorted(living[:most], key=lambda s: ordered.uses[s][0])
    decisions: dict[int, list[Decision]] = defaultdict(list)
    for d in plan.decisions:
        decisions[d.storage].append(d)
    bars: list[Bar] = []
    for lane, s in enumerate(chosen):
        bars += _bars(ordered, lane, s, decisions[s])
    return Drawing(
        tuple((_lane_name(ordered, s), ordered.storages[s].nbytes) for s in chosen),
        tuple(bars),
        program.timeline,
        moments,
        plan.ram_bytes,
        plan.strategy,
        tuple(_name(ordered, i) for i in range(len(ordered.ops))),
        tuple(_phases(ordered)),
        _figures(program, plan),
        costs.device.base_bytes,
        len(living) - len(chosen),
        tuple(_runs(ordered)),
    )


def _figures(program: Program, plan: Plan) -> tuple[tuple[str, str], ...]:
    tiled = len(program.graph.tiles)
    figures = [
        ("peak", format_bytes(program.peak_bytes)),
        ("a step takes", format_seconds(program.seconds)),
        ("recomputing", format_seconds(program.recompute_seconds)),
        ("waiting for flash", format_seconds(program.stall_seconds)),
        ("energy", format_joules(program.joules)),
        ("read from flash", format_bytes(program.read_bytes)),
        ("written to flash", format_bytes(program.written_bytes)),
        ("found by", plan.strategy),
        *([("in tiles", "1 chain" if tiled == 1 else f"{tiled} chains")] if tiled else []),
    ]
    return tuple(figures)


def _lane_name(graph: StepGraph, s: int) -> str:
    """Return a storage's label, with the module whose weights its creating operator takes."""
    module = "" if graph.storages[s].name else graph.module_of(graph.uses[s][0])
    return f"{graph.label(s)}{' of ' * bool(module)}{module}"


def _name(graph: StepGraph, i: int) -> str:
    """Return an operator's name with its module, and its tile number and the number of tiles."""
    name, tile = graph.operator_of_module(i), graph.ops[i].tile
    return name if tile is None else f"{name}, tile {tile.index + 1} of {tile.count}"


def _runs(graph: StepGraph) -> Iterator[TileRun]:
    start = 0
    for together, ops in itertools.groupby(graph.ops, key=lambda op: op.tile and replace(op.tile, reordered=False)):
        tiles = [op.tile for op in ops]
        stop = start + len(tiles)
        if together is not None:
            yield TileRun(replace(together, reordered=any(tile and tile.reordered for tile in tiles)), start, stop)
        start = stop


def _phases(graph: StepGraph) -> Iterator[Span]:
    start = 0
    for phase, ops in itertools.groupby(graph.ops, key=lambda op: op.phase):
        stop = start + len(list(ops))
        yield Span(phase.name.lower(), start, stop)
        start = stop


def _bars(graph: StepGraph, lane: int, s: int, decisions: list[Decision]) -> list[Bar]:
    """Return when storage `s` is resident: from each return to the next eviction."""
    n, uses = len(graph.ops), graph.uses[s]
    storage = graph.storages[s]
    start, stop = (uses[0], uses[-1] + 1) if storage.role is Role.TEMPORARY else (0, n)
    is_written = not storage.persistent or bool(graph.writers[s])
    found: list[Bar] = []
    gaps = sorted((d for d in decisions if d.action is not Action.INTERMEDIATE), key=lambda d: d.after)
    shade = Shade.KEEP
    wrapping = next((d for d in gaps if d.before <= d.after), None)
    if wrapping is not None:
        start, shade = wrapping.before, Shade.PAGE_IN
    for d in gaps:
        if d.action is Action.PACK:
            found.append(Bar(lane, d.after + 1, d.before, Shade.PACKED))
        end = d.after + 1
        if end > start:
            found += (
                _leaving(Bar(lane, start, end, shade))
                if d.action in (Action.PAGE, Action.PACK_PAGE) and is_written
                else ([Bar(lane, start, end, shade)])
            )
        if d is wrapping:
            start = stop
            break
        start, shade = d.before, _RETURNS[d.action]
    if start < stop:
        found.append(Bar(lane, start, stop, shade))
    found += [Bar(lane, d.before, d.before + 1, Shade.RECOMPUTE) for d in decisions if d.action is Action.INTERMEDIATE]
    return found


def _leaving(bar: Bar) -> list[Bar]:
    """Split off the end of a bar in the colour for writes to flash."""
    middle = max(bar.start, bar.stop - max((bar.stop - bar.start) // 3, 1))
    parts = (replace(bar, stop=middle), replace(bar, start=middle, shade=Shade.PAGE_OUT))
    return [part for part in parts if part.stop > part.start]
