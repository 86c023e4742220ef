"""The step table: every kernel call of one training sample with the places of its operands, recomputation included.

A program (`planner.mcu.autodiff`) names tensors; a table names *residencies*. A tensor that is kept has one, called as
the tensor. One that is dropped after the forward part and computed again has a second, `conv3@2`, which may lie elsewhere
in the arena, and the row of its operator stands in the table twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.ir.errors import PortError
from planner.mcu.autodiff import SampleProgram, Step, StepKind, gradient_of, reads, writes
from planner.mcu.ir import Graph, KernelCall, OpKind, scratch_bytes


@dataclass(frozen=True, slots=True)
class TableRow:
    """One kernel call. Operands are residencies; "" where the kind has no such operand.

    `again`: the operator ran before in this sample.
    """

    kind: StepKind
    op: str
    source: str = ""
    other: str = ""
    output: str = ""
    scratch: str = ""
    gradient: str = ""
    target: str = ""
    accumulate: bool = False
    again: bool = False

    @property
    def touched(self) -> tuple[str, ...]:
        """The residencies that must lie in the arena while this row runs."""
        names = (self.source, self.other, self.output, self.scratch, self.gradient, self.target)
        return tuple(name for name in names if name)


@dataclass(frozen=True, slots=True)
class RepeatedOps:
    """Which tensors are computed again, in order, before which step of the program."""

    before: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(len(names) for names in self.before.values())


class TableError(PortError):
    """A step table that does not compute what its program does: a defect of the planner, with the row it shows at."""

    def __init__(self, index: int, row: TableRow, problem: str) -> None:
        super().__init__(f"row {index} ({row.kind.name} {row.op}): {problem}; report this, the planner is wrong")
        self.index = index
        self.row = row


def home(graph: Graph, tensor: str) -> str:
    """Return the tensor whose memory this one has: the classifier's gradient lies where its logits were."""
    last = graph.ops[-1].name
    return last if tensor == gradient_of(last) else tensor


def table_rows(
    program: SampleProgram, recomputation: RepeatedOps | None = None, *, simd: bool = True
) -> list[TableRow]:
    """Return the rows of a fused program in which `recomputation` is carried out."""
    wanted = RepeatedOps() if recomputation is None else recomputation
    place = _Residencies(program.graph, simd)
    rows = []
    for index, step in enumerate(program.steps):
        for name in wanted.before.get(index, ()):
            rows.append(place.row(Step(StepKind.FORWARD, name), again=True))
        rows.append(place.row(step))
    return rows


class _Residencies:
    """The current residency of every tensor, while rows are written."""

    def __init__(self, graph: Graph, simd: bool) -> None:
        self.graph, self.simd = graph, simd
        self.current: dict[str, str] = {graph.input_name: graph.input_name}
        self.count: dict[str, int] = {graph.input_name: 1}

    def row(self, step: Step, again: bool = False) -> TableRow:
        """Return a step's row; a forward step starts a residency."""
        op = self.graph.op(step.op)
        if step.kind is StepKind.FORWARD:
            return self._forward(op, again)
        source = ""
        if step.kind is StepKind.WEIGHT or (step.kind is StepKind.INPUT and op.kind is OpKind.MAX_POOL):
            source = self._found(op.inputs[0])
        return TableRow(
            step.kind, step.op, source=source,
            output=self._found(step.op) if step.kind is StepKind.MASK else "",
            gradient=self._found(step.gradient),
            target=self._found(step.target) if step.kind in (StepKind.INPUT, StepKind.COPY) else "",
            accumulate=step.accumulate,
        )  # fmt: skip

    def _forward(self, op: KernelCall, again: bool) -> TableRow:
        inputs = [self._found(name) for name in op.inputs]
        number = self.count[op.name] = self.count.get(op.name, 0) + 1
        self.current[op.name] = op.name if number == 1 else f"{op.name}@{number}"
        scratch = f"s:{self.current[op.name]}" if self.simd and scratch_bytes(op) else ""
        return TableRow(
            StepKind.FORWARD, op.name, inputs[0], inputs[1] if len(inputs) > 1 else "", self.current[op.name], scratch,
            again=again,
        )  # fmt: skip

    def _found(self, tensor: str) -> str:
        name = home(self.graph, tensor)
        return self.current.setdefault(name, name)


def tensor_of(residency: str) -> str:
    """Return the tensor that a residency holds."""
    return residency.rpartition("@")[0] or residency


Contents = tuple[str, int]
"""A tensor and how often it has been written."""


def verify_table(program: SampleProgram, rows: list[TableRow]) -> None:
    """Raise TableError unless the rows do what the program does, operand for operand.

    Both are run on symbols. What a row reads must be the tensor that the program's step reads, written as often;
    an operator that runs again must read what it read the first time, with weights that were not updated since.
    """
    steps = iter(program.steps)
    wanted: dict[str, int] = {program.graph.input_name: 1}
    held: dict[str, Contents] = {program.graph.input_name: (program.graph.input_name, 1)}
    updated: set[str] = set()
    for index, row in enumerate(rows):
        if row.again:
            _verify_again(program.graph, index, row, held, updated)
            continue
        step = next(steps, None)
        if step is None or (step.kind, step.op, step.accumulate) != (row.kind, row.op, row.accumulate):
            raise TableError(index, row, f"the program's step is {step}")
        _verify_step(program.graph, index, row, step, wanted, held)
        if row.kind in (StepKind.WEIGHT, StepKind.BIAS):
            updated.add(row.op)
    if next(steps, None) is not None and rows:
        raise TableError(len(rows) - 1, rows[-1], "the table ends before its program")


def _verify_again(graph: Graph, index: int, row: TableRow, held: dict[str, Contents], updated: set[str]) -> None:
    op = graph.op(row.op)
    if row.op in updated:
        raise TableError(index, row, "runs again after its weights were updated")
    for name, residency in zip(op.inputs, (row.source, row.other), strict=False):
        if held.get(residency) != (name, 1):
            raise TableError(index, row, f"reads {residency}, which holds {held.get(residency)}, not {name}")
    held[row.output] = (row.op, 1)


def _verify_step(
    graph: Graph, index: int, row: TableRow, step: Step, wanted: dict[str, int], held: dict[str, Contents]
) -> None:
    operands = _operands(graph, row, step)
    for tensor in reads(graph, step):
        name = home(graph, tensor)
        if held.get(operands[name]) != (name, wanted[name]):
            raise TableError(
                index, row, f"reads {operands[name]}, which holds {held.get(operands[name])}, not {name} as it is"
            )
    for tensor in writes(graph, step):
        name = home(graph, tensor)
        wanted[name] = wanted.get(name, 0) + 1
        held[operands[name]] = (name, wanted[name])


def _operands(graph: Graph, row: TableRow, step: Step) -> dict[str, str]:
    """Return the residency of every tensor that the row touches, by the tensor's name."""
    op = graph.op(row.op)
    found = {home(graph, step.target): row.target, home(graph, step.gradient): row.gradient}
    if row.kind is StepKind.FORWARD:
        found = dict(zip(op.inputs, (row.source, row.other), strict=False)) | {row.op: row.output}
    elif row.source:
        found[op.inputs[0]] = row.source
    if row.kind is StepKind.MASK:
        found[row.op] = row.output
    return found


def forward_rows(rows: list[TableRow]) -> int:
    """Return how many rows inference runs: those before the loss."""
    return next((index for index, row in enumerate(rows) if row.kind is StepKind.LOSS), len(rows))
