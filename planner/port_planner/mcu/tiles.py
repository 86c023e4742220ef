"""The backward pass in bands of lines: the gradients between two operators exist a few lines at a time.

A gradient is fp32 and as large as its activation, so two gradients, not the kept tensors, decide how much RAM a
training step needs. So a group of neighbouring convolutions runs line by line: one band of the lowest gradient, and for
it the lines of every gradient above that it depends on (a halo where kernels overlap). Sums over pixels are suspended
after one band and resumed in the next, in the order of the whole, so that every bit is that of the undivided step.
MCUNetV2 (arXiv 2110.15352) does the same for inference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from port_planner.base.errors import PortError
from port_planner.mcu.arena import aligned
from port_planner.mcu.autodiff import Lines, SampleProgram, Step, StepKind, TableRow, gradient_of
from port_planner.mcu.ir import Graph, KernelCall, OpKind, scratch_bytes

BANDABLE = frozenset({OpKind.CONV, OpKind.DEPTHWISE})

Span = tuple[int, int]
"""Lines [first, last)."""


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Operators `ops`, lowest first, whose inner gradients exist in bands of about `lines` lines of the lowest.

    `forward`: their inner activations are recomputed band by band, too. `start`, `stop`: the
    steps that the group replaces.
    """

    ops: tuple[str, ...]
    lines: int
    forward: bool
    start: int
    stop: int


def tile_groups(program: SampleProgram) -> list[tuple[str, ...]]:
    """Return the longest runs of operators of which a group may take a part, lowest operator first."""
    graph = program.graph
    readers: dict[str, int] = {}
    for op in graph.ops:
        for name in op.inputs:
            readers[name] = readers.get(name, 0) + 1
    runs: list[list[str]] = []
    for op in graph.ops:
        before = runs[-1][-1] if runs and runs[-1] else ""
        follows = op.inputs == (before,) and readers[before] == 1 and graph.op(before).out_shape == op.in_shape
        if op.kind not in BANDABLE:
            runs.append([])
        elif follows:
            runs[-1].append(op.name)
        else:
            runs.append([op.name])
    return [tuple(run) for run in runs if len(run) > 1]


def make_group(program: SampleProgram, ops: tuple[str, ...], lines: int, forward: bool) -> TileGroup | None:
    """Return the group of these operators; None if the program does not differentiate through all of them."""
    inside = set(ops)
    top = ops[-1]
    first = next((i for i, s in enumerate(program.steps) if s.kind is StepKind.INPUT and s.op == top), None)
    if first is None or len(ops) < 2:
        return None
    stop = first
    while stop < len(program.steps) and program.steps[stop].op in inside:
        stop += 1
    masked = {s.op for s in program.steps[first:stop] if s.kind is StepKind.MASK}
    return TileGroup(ops, lines, forward, first, stop) if set(ops[:-1]) <= masked else None


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The rows of a group, and the bytes of the buffers that only it has."""

    rows: tuple[TableRow, ...]
    sizes: dict[str, int]


def tile_of(tensor: str) -> str:
    """Return the name of the buffer that holds some lines of a tensor."""
    return f"band:{tensor}"


def lines_read(op: KernelCall, out: Span) -> Span:
    """Return the input lines that these output lines depend on."""
    first = out[0] * op.stride[0] - op.padding[0]
    last = (out[1] - 1) * op.stride[0] - op.padding[0] + op.kernel[0]
    return max(first, 0), min(max(last, 0), op.in_shape.height)


def lines_reached(op: KernelCall, inputs: Span) -> Span:
    """Return the output lines that depend on these input lines: their gradients are needed for the
    gradients of these lines.
    """
    first = -(-(inputs[0] + op.padding[0] - op.kernel[0] + 1) // op.stride[0])
    last = (inputs[1] - 1 + op.padding[0]) // op.stride[0] + 1
    first = min(max(first, 0), op.out_shape.height)
    return first, max(first, min(last, op.out_shape.height))


@dataclass(slots=True)
class _Tile:
    """The lines of one band: `windows` of each gradient, `fresh` of them not seen before,
    `again` of each activation.
    """

    target: Span
    windows: dict[str, Span] = field(default_factory=dict)
    fresh: dict[str, Span] = field(default_factory=dict)
    again: dict[str, Span] = field(default_factory=dict)


def group_rows(program: SampleProgram, group: TileGroup, place: dict[str, str], simd: bool) -> GroupRows:
    """Return the rows of a group. `place`: the residencies of the whole tensors it touches, by tensor."""
    return _Writer(program, group, place, simd).write()


class _Writer:
    """Writes the rows of one group."""

    def __init__(self, program: SampleProgram, group: TileGroup, place: dict[str, str], simd: bool) -> None:
        self.graph, self.group, self.place, self.simd = program.graph, group, place, simd
        self.ops = [program.graph.op(name) for name in group.ops]
        self.steps = {(s.kind, s.op): s for s in program.steps[group.start : group.stop]}
        self.tiles = list(self._tiles())
        self.resumed: set[str] = set()

    def write(self) -> GroupRows:
        rows = [row for tile in self.tiles for row in self._tile_rows(tile)]
        return GroupRows((*rows, *self._finish()), self._sizes())

    def _has(self, kind: StepKind, op: KernelCall) -> Step | None:
        return self.steps.get((kind, op.name))

    def _tiles(self) -> Iterator[_Tile]:
        low, top = self.ops[0], self.ops[-1]
        height = low.in_shape.height if self._has(StepKind.INPUT, low) else low.out_shape.height
        seen = dict.fromkeys(self.group.ops, 0)
        for start in range(0, height, self.group.lines):
            tile = _Tile((start, min(start + self.group.lines, height)))
            final, wanted = tile.target[1] == height, tile.target
            for op in self.ops:
                if op is not low or self._has(StepKind.INPUT, low):
                    wanted = lines_reached(op, wanted)
                first = min(wanted[0], seen[op.name])
                wanted = first, op.out_shape.height if final else max(wanted[1], seen[op.name])
                tile.windows[op.name], tile.fresh[op.name] = wanted, (seen[op.name], wanted[1])
                seen[op.name] = wanted[1]
            self._activations(tile, top)
            yield tile

    def _activations(self, tile: _Tile, top: KernelCall) -> None:
        """Set the lines of each inner activation that this band reads, from the top down."""
        above: Span | None = None
        for op, reader in zip(reversed(self.ops[:-1]), reversed(self.ops[1:]), strict=True):
            spans = [tile.windows[op.name]]
            if tile.fresh[reader.name][0] < tile.fresh[reader.name][1]:
                spans.append(lines_read(reader, tile.fresh[reader.name]))
            if above is not None:
                spans.append(lines_read(reader, above))
            above = min(s[0] for s in spans), max(s[1] for s in spans)
            tile.again[op.name] = above

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for op in self.ops[:-1]:
            line = op.out_shape.width * op.out_shape.channels
            most = max(b - a for a, b in (tile.windows[op.name] for tile in self.tiles))
            sizes[tile_of(gradient_of(op.name))] = aligned(4 * line * most)
            if self.group.forward:
                most = max(b - a for a, b in (tile.again[op.name] for tile in self.tiles))
                sizes[tile_of(op.name)] = aligned(line * most)
        return sizes

    def _tile_rows(self, tile: _Tile) -> Iterator[TableRow]:
        if self.group.forward:
            yield from (self._forward(op, tile) for op in self.ops[:-1])
            yield from self._sum(StepKind.WEIGHT, self.ops[-1], tile)
        for above, op in zip(reversed(self.ops[1:]), reversed(self.ops[:-1]), strict=True):
            yield self._input(above, tile, tile.windows[op.name])
            window = tile.windows[op.name]
            yield TableRow(
                StepKind.MASK,
                op.name,
                output=self._activation(op.name),
                gradient=tile_of(gradient_of(op.name)),
                span=window,
                lines=Lines(output=self._line(op.name, tile), gradient=window[0]),
                part=True,
            )
            yield from self._sum(StepKind.WEIGHT, op, tile)
            yield from self._sum(StepKind.BIAS, op, tile)
        if self._has(StepKind.INPUT, self.ops[0]):
            yield self._input(self.ops[0], tile, tile.target)

    def _forward(self, op: KernelCall, tile: _Tile) -> TableRow:
        scratch = f"s:{op.name}" if scratch_bytes(op, self.simd) else ""
        lines = Lines(self._line(op.inputs[0], tile), tile.again[op.name][0])
        return TableRow(
            StepKind.FORWARD,
            op.name,
            self._activation(op.inputs[0]),
            output=tile_of(op.name),
            scratch=scratch,
            again=True,
            span=tile.again[op.name],
            lines=lines,
            part=True,
        )

    def _inner(self, tensor: str) -> bool:
        return tensor in self.group.ops[:-1]

    def _activation(self, tensor: str) -> str:
        return tile_of(tensor) if self.group.forward and self._inner(tensor) else self.place[tensor]

    def _line(self, tensor: str, tile: _Tile) -> int:
        return tile.again[tensor][0] if self.group.forward and self._inner(tensor) else 0

    def _gradient(self, op: KernelCall, tile: _Tile) -> tuple[str, int]:
        """Return where the gradient of an operator's output lies, and its first line there."""
        name = gradient_of(op.name)
        if self._inner(op.name):
            return tile_of(name), tile.windows[op.name][0]
        return self.place[self.steps[StepKind.INPUT, op.name].gradient], 0

    def _input(self, op: KernelCall, tile: _Tile, target: Span) -> TableRow:
        step = self.steps[StepKind.INPUT, op.name]
        gradient, line = self._gradient(op, tile)
        inner = self._inner(op.inputs[0])
        return TableRow(
            StepKind.INPUT,
            op.name,
            gradient=gradient,
            accumulate=step.accumulate,
            span=target,
            part=True,
            target=tile_of(gradient_of(op.inputs[0])) if inner else self.place[step.target],
            lines=Lines(gradient=line, target=target[0] if inner else 0),
        )

    def _sum(self, kind: StepKind, op: KernelCall, tile: _Tile) -> Iterator[TableRow]:
        span = tile.fresh[op.name]
        if self._has(kind, op) is None or span[0] >= span[1]:
            return
        gradient, line = self._gradient(op, tile)
        source = self._activation(op.inputs[0]) if kind is StepKind.WEIGHT else ""
        sums = _sums(kind, op.name)
        yield TableRow(
            kind,
            op.name,
            source,
            gradient=gradient,
            scratch=sums,
            span=span,
            part=True,
            resumes=sums in self.resumed,
            suspends=True,
            lines=Lines(self._line(op.inputs[0], tile) if source else 0, gradient=line),
        )
        self.resumed.add(sums)

    def _finish(self) -> Iterator[TableRow]:
        """Yield the updates, in the order in which the program draws its random numbers."""
        for step in self.steps.values():
            if step.kind not in (StepKind.WEIGHT, StepKind.BIAS):
                continue
            sums = _sums(step.kind, step.op)
            if sums in self.resumed:
                yield TableRow(
                    step.kind,
                    step.op,
                    gradient=sums,
                    scratch=sums,
                    span=(0, 0),
                    part=True,
                    resumes=True,
                )
                continue
            op = self.graph.op(step.op)
            source = self.place[op.inputs[0]] if step.kind is StepKind.WEIGHT else ""
            yield TableRow(
                step.kind, step.op, source, gradient=self.place[step.gradient], part=True, span=(0, op.out_shape.height)
            )


def _sums(kind: StepKind, op: str) -> str:
    return f"{'dw' if kind is StepKind.WEIGHT else 'db'}:{op}"


def group_tensors(program: SampleProgram, group: TileGroup) -> tuple[list[str], list[str]]:
    """Return the whole tensors that a group reads, and those it writes."""
    graph: Graph = program.graph
    inner = set(group.ops[:-1])
    inside = {*inner} if group.forward else set()
    read, written = [], []
    for step in program.steps[group.start : group.stop]:
        op = graph.op(step.op)
        names = [step.gradient]
        if step.kind is StepKind.MASK:
            names.append(step.op)
        if step.kind is StepKind.WEIGHT or (group.forward and step.op in inner):
            names.append(op.inputs[0])
        hidden = {gradient_of(name) for name in inner} | inside
        read += [name for name in names if name not in hidden]
        if step.target and step.target not in hidden:
            written.append(step.target)
            read += [step.target] if step.accumulate else []
    return list(dict.fromkeys(read)), list(dict.fromkeys(written))


class TileError(PortError):
    """Raised for a group of bands that does not compute what its operators do, a defect of the planner;
    carries the row where it shows.
    """

    def __init__(self, index: int, row: TableRow, problem: str) -> None:
        super().__init__(f"band row {index} ({row.kind.name} {row.op}): {problem}; report this, the planner is wrong")
        self.index = index
        self.row = row


Content = tuple[str, int, bool]
"""A tensor's line in a buffer, and whether it may be read: computed and, if it is a gradient, masked."""


class TileVerifier:
    """Runs the rows of one group on symbols, line by line, without trusting the spans that the writer stated."""

    def __init__(self, program: SampleProgram, group: TileGroup, whole: dict[str, str]) -> None:
        """`whole`: the tensor in each residency that the group may read."""
        self.graph, self.group, self.whole = program.graph, group, whole
        self.steps = program.steps[group.start : group.stop]
        self.gradients = {s.op: s.gradient for s in self.steps}
        self.buffers: dict[str, dict[int, Content]] = {}
        self.summed: dict[str, int] = {}
        self.done: dict[str, list[int]] = {}
        self.updates: list[tuple[StepKind, str]] = []

    def run(self, rows: tuple[TableRow, ...]) -> None:
        """Raise TileError unless the rows do what the group's steps do."""
        for index, row in enumerate(rows):
            problem = self._row(row)
            if problem:
                raise TileError(index, row, problem)
        wanted = [(s.kind, s.op) for s in self.steps if s.kind in (StepKind.WEIGHT, StepKind.BIAS)]
        if self.updates != wanted:
            raise TileError(len(rows) - 1, rows[-1], f"updates {self.updates}, not {wanted}")
        low = self.graph.op(self.group.ops[0])
        passes = any(s.kind is StepKind.INPUT and s.op == low.name for s in self.steps)
        if passes and self.done.get(low.name) != list(range(low.in_shape.height)):
            raise TileError(len(rows) - 1, rows[-1], "not every line of the lowest gradient is written once")

    def _row(self, row: TableRow) -> str:
        op = self.graph.op(row.op)
        if any(name == row.op for _, name in self.updates) and row.kind in (StepKind.FORWARD, StepKind.INPUT):
            return "reads weights after their update"
        match row.kind:
            case StepKind.FORWARD:
                return self._forward(row, op)
            case StepKind.INPUT:
                return self._input(row, op)
            case StepKind.MASK:
                return self._mask(row)
        return self._sum(row, op)

    def _lacks(self, buffer: str, tensor: str, origin: int, span: Span) -> str:
        if self.whole.get(buffer) == tensor:
            return "" if origin == 0 else f"{buffer} is whole, so its line 0 cannot be {origin}"
        held = self.buffers.get(buffer, {})
        missing = [line for line in range(*span) if held.get(line - origin) != (tensor, line, True)]
        return f"lines {missing} of {tensor} are not in {buffer}" if missing else ""

    def _forward(self, row: TableRow, op: KernelCall) -> str:
        span = row.span or (0, op.out_shape.height)
        problem = self._lacks(row.source, op.inputs[0], row.lines.source, lines_read(op, span))
        for line in range(*span):
            self.buffers.setdefault(row.output, {})[line - row.lines.output] = (op.name, line, True)
        return problem

    def _input(self, row: TableRow, op: KernelCall) -> str:
        span = row.span or (0, op.in_shape.height)
        problem = self._lacks(row.gradient, self.gradients[op.name], row.lines.gradient, lines_reached(op, span))
        if row.target.startswith("band:"):
            for line in range(*span):
                held = self.buffers.setdefault(row.target, {})
                held[line - row.lines.target] = (gradient_of(op.inputs[0]), line, False)
        else:
            self.done.setdefault(op.name, []).extend(range(*span))
        return problem

    def _mask(self, row: TableRow) -> str:
        op = self.graph.op(row.op)
        span, held = row.span or (0, op.out_shape.height), self.buffers.get(row.gradient, {})
        for line in range(*span):
            if held.get(line - row.lines.gradient) != (gradient_of(row.op), line, False):
                return f"line {line} of the gradient is missing, or already masked"
            held[line - row.lines.gradient] = (gradient_of(row.op), line, True)
        return self._lacks(row.output, row.op, row.lines.output, span)

    def _sum(self, row: TableRow, op: KernelCall) -> str:
        first, last = row.span or (0, op.out_shape.height)
        if not row.suspends:
            self.updates.append((row.kind, row.op))
            if row.resumes:
                complete = self.summed.get(row.scratch) == op.out_shape.height
                return "" if complete else "updates before all lines are summed"
            if (first, last) != (0, op.out_shape.height):
                return f"updates with lines {first} to {last} only"
        elif self.summed.get(row.scratch, 0) != first or row.resumes != (first > 0):
            return f"sums from line {first}, but {self.summed.get(row.scratch, 0)} lines are summed"
        self.summed[row.scratch] = last
        problem = self._lacks(row.gradient, self.gradients[op.name], row.lines.gradient, (first, last))
        if not problem and row.source:
            problem = self._lacks(row.source, op.inputs[0], row.lines.source, lines_read(op, (first, last)))
        return problem
