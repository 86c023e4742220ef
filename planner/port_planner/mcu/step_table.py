"""The step table: every kernel call of one training sample with the places of its operands, recomputation included.

A program (`port_planner.mcu.autodiff`) names tensors; a table names *residencies*. A tensor that is kept has one, named
like the tensor. One that is dropped after the forward part and recomputed has a second, `conv3@2`, which may lie
elsewhere in the arena, and its operator's row appears twice in the table. One that was paged out also comes back to a
second residency (`port_planner.mcu.pages`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from port_planner.base.errors import PortError
from port_planner.mcu.autodiff import (
    PAGE_KINDS,
    SampleProgram,
    Step,
    StepKind,
    TableRow,
    gradient_of,
    reads,
    reads_output,
    stored_inputs,
    writes,
)
from port_planner.mcu.ir import Graph, KernelCall, scratch_bytes
from port_planner.mcu.pages import (
    PARAMETER_USERS,
    UPDATES,
    BoardPaging,
    Contents,
    PageVerifier,
    for_training_only,
    is_parameters,
    parameter_name,
    verify_parameters,
    with_transfer_beside,
)
from port_planner.mcu.tiles import GroupRows, TileGroup, TileVerifier, group_rows, group_tensors


@dataclass(frozen=True, slots=True)
class RepeatedOps:
    """The tensors that are recomputed before each step of the program, in order; parameters are read again."""

    before: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(not is_parameters(name) for names in self.before.values() for name in names)


class TableError(PortError):
    """Raised for a step table that does not compute what its program does, a defect of the planner;
    carries the row where it shows.
    """

    def __init__(self, index: int, row: TableRow, problem: str) -> None:
        super().__init__(f"row {index} ({row.kind.name} {row.op}): {problem}; report this, the planner is wrong")
        self.index = index
        self.row = row


def home(graph: Graph, tensor: str) -> str:
    """Return the tensor whose memory this one uses: the classifier's gradient lies in the memory of its logits."""
    last = graph.ops[-1].name
    return last if tensor == gradient_of(last) else tensor


@dataclass(frozen=True, slots=True)
class StepTable:
    """Rows, and the bytes of the buffers that exist only in bands."""

    rows: tuple[TableRow, ...]
    sizes: dict[str, int] = field(default_factory=dict)


def table_rows(
    program: SampleProgram,
    repeated: RepeatedOps | None = None,
    *,
    simd: bool = True,
    groups: Sequence[TileGroup] = (),
    paging: BoardPaging | None = None,
    chooses: bool = False,
) -> StepTable:
    """Return the table of a fused program in which `repeated` runs again, `groups` run in bands
    and `paging` moves pages.

    `chooses`: weight updates are dynamic, with scratch for the norms of the channel groups.

    Raises TableError, TileError or BoardPageError if the table does not compute what the program does.
    """
    wanted, moved = repeated or RepeatedOps(), paging or BoardPaging()
    place, starts = _Residencies(program, simd, moved, chooses), {group.start: group for group in groups}
    rows: list[TableRow] = []
    sizes: dict[str, int] = {}
    stop = 0
    for index, step in enumerate(program.steps):
        rows += place.transfers(index)
        for name in wanted.before.get(index, ()):
            rows += place.load(name) if is_parameters(name) else [place.row(Step(StepKind.FORWARD, name), again=True)]
        if index in starts:
            made = place.group(program, starts[index])
            rows, stop = rows + list(made.rows), starts[index].stop
            sizes |= {name: max(size, sizes.get(name, 0)) for name, size in made.sizes.items()}
            rows += [row for done in program.steps[index:stop] for row in place.stores(done)]
        if index >= stop:
            rows += place.first_load(step)
            rows.append(place.row(step))
            rows += place.stores(step)
    for name in moved.carried:
        rows = _ends_where_it_began(rows, parameter_name(name))
    for transfer in moved.beside:
        rows = with_transfer_beside(rows, transfer)
    verify_table(program, rows, groups)
    return StepTable(for_training_only(rows), sizes)


def _ends_where_it_began(rows: Sequence[TableRow], page: str) -> list[TableRow]:
    """Return the rows in which the last residency of carried parameters is that of their
    first read, which is marked.
    """
    read = [index for index, row in enumerate(rows) if row.kind is StepKind.PAGE_IN and row.page == page]
    first, last = (rows[index].output for index in (read[0], read[-1]))

    def named(residency: str) -> str:
        return first if residency == last else residency

    return [
        replace(
            row,
            source=named(row.source),
            output=named(row.output),
            parameters=named(row.parameters),
            carried=row.carried or index == read[0],
        )
        for index, row in enumerate(rows)
    ]


class _Residencies:
    """The current residency of every tensor while rows are written."""

    def __init__(self, program: SampleProgram, simd: bool, paging: BoardPaging, chooses: bool) -> None:
        self.graph, self.simd, self.paging, self.chooses = program.graph, simd, paging, chooses
        name = self.graph.input_name
        self.current: dict[str, str] = {name: name}
        self.count: dict[str, int] = {name: 1}
        self.leaving: dict[str, str] = {}
        self.updates: dict[str, int] = {}
        for step in program.steps if paging.parameters else ():
            if step.kind in UPDATES:
                self.updates[step.op] = self.updates.get(step.op, 0) + 1

    def _new(self, tensor: str) -> str:
        number = self.count[tensor] = self.count.get(tensor, 1 if tensor in self.current else 0) + 1
        self.current[tensor] = tensor if number == 1 else f"{tensor}@{number}"
        return self.current[tensor]

    def transfers(self, index: int) -> list[TableRow]:
        """Return the page rows before a step: first the waits, then the transfers that start."""
        waits, starts = [], []
        for transfer in self.paging.transfers:
            if transfer.out is not None and transfer.out[1] == index:
                waits.append(TableRow(StepKind.PAGE_WAIT, "", self.leaving[transfer.tensor], page=transfer.tensor))
            if transfer.back[1] == index:
                waits.append(
                    TableRow(StepKind.PAGE_WAIT, "", output=self._found(transfer.tensor), page=transfer.tensor)
                )
        for transfer in self.paging.transfers:
            if transfer.out is not None and transfer.out[0] == index:
                self.leaving[transfer.tensor] = self._found(transfer.tensor)
                starts.append(TableRow(StepKind.PAGE_OUT, "", self.leaving[transfer.tensor], page=transfer.tensor))
        for transfer in self.paging.transfers:
            if transfer.back[0] == index:
                starts.append(TableRow(StepKind.PAGE_IN, "", output=self._new(transfer.tensor), page=transfer.tensor))
        return waits + starts

    def load(self, parameters: str) -> list[TableRow]:
        """Return the rows that read a layer's parameters."""
        name = self._new(parameters)
        rows = (StepKind.PAGE_IN, StepKind.PAGE_WAIT)
        return [TableRow(kind, "", output=name, page=parameters) for kind in rows]

    def first_load(self, step: Step) -> list[TableRow]:
        """Return the rows that read the parameters of a layer that runs for the first time."""
        return self.load(parameter_name(step.op)) if step.kind is StepKind.FORWARD and step.op in self.updates else []

    def stores(self, step: Step) -> list[TableRow]:
        """Return the rows that write a layer's parameters after its last update."""
        if step.kind not in UPDATES or step.op not in self.updates:
            return []
        self.updates[step.op] -= 1
        if self.updates[step.op]:
            return []
        name = parameter_name(step.op)
        rows = (StepKind.PAGE_OUT, StepKind.PAGE_WAIT)
        return [TableRow(kind, "", self._found(name), page=name) for kind in rows]

    def _parameters(self, op: str) -> str:
        return self._found(parameter_name(op)) if op in self.updates else ""

    def row(self, step: Step, again: bool = False) -> TableRow:
        """Return a step's row; a forward step starts a residency."""
        op = self.graph.op(step.op)
        if step.kind is StepKind.FORWARD:
            return self._forward(op, again)
        places = {position: self._found(op.inputs[position]) for position in stored_inputs(op, step)}
        return TableRow(
            step.kind,
            step.op,
            source=places.get(0, ""),
            other=f"norm:{step.op}" if self._chooses(step) else places.get(1, ""),
            output=self._found(step.op) if reads_output(op, step) else "",
            gradient=self._found(step.gradient),
            target=self._found(step.target) if step.target and step.kind is not StepKind.LOSS else "",
            accumulate=step.accumulate,
            second=step.second,
            parameters=self._parameters(step.op) if step.kind in PARAMETER_USERS else "",
        )

    def _chooses(self, step: Step) -> bool:
        return self.chooses and step.kind is StepKind.WEIGHT

    def _forward(self, op: KernelCall, again: bool) -> TableRow:
        inputs = [self._found(name) for name in op.inputs]
        name = self._new(op.name)
        scratch = f"s:{name}" if scratch_bytes(op, self.simd) else ""
        return TableRow(
            StepKind.FORWARD,
            op.name,
            inputs[0],
            inputs[1] if len(inputs) > 1 else "",
            name,
            scratch,
            again=again,
            parameters=self._parameters(op.name),
        )

    def group(self, program: SampleProgram, group: TileGroup) -> GroupRows:
        """Return the rows of a group of operators that run in bands."""
        read, written = group_tensors(program, group)
        place = {name: self._found(name) for name in (*read, *written)}
        made = group_rows(program, group, place, self.simd)
        rows = tuple(
            replace(row, parameters=self._parameters(row.op)) if row.kind in PARAMETER_USERS else row
            for row in made.rows
        )
        return GroupRows(rows, made.sizes)

    def _found(self, tensor: str) -> str:
        name = home(self.graph, tensor)
        return self.current.setdefault(name, name)


def tensor_of(residency: str) -> str:
    """Return the tensor that a residency holds."""
    return residency.rpartition("@")[0] or residency


def verify_table(program: SampleProgram, rows: Sequence[TableRow], groups: Sequence[TileGroup] = ()) -> None:
    """Raise TableError, TileError, BoardPageError unless the rows do what the program does, operand for operand.

    Both are run on symbols. A row must read the tensor that the program's step reads, after the same number of writes.
    An operator that runs again must read what it read the first time, with weights that were not updated since.
    """
    starts = {group.start: group for group in groups}
    wanted: dict[str, int] = {program.graph.input_name: 1}
    held: dict[str, Contents] = {program.graph.input_name: (program.graph.input_name, 1)}
    updated: set[str] = set()
    pages = PageVerifier()
    at = index = 0
    while index < len(rows):
        row = rows[index]
        pages.check(index, row, held)
        if row.kind in PAGE_KINDS:
            if not is_parameters(row.page):
                pages.run(index, row, held)
            index += 1
            continue
        if row.part:
            stop = next((i for i in range(index, len(rows)) if not rows[i].part), len(rows))
            if at not in starts:
                raise TableError(index, row, f"no group begins at step {at} of the program")
            index = _verify_group(program, starts[at], rows, (index, stop), wanted, held)
            updated |= set(starts[at].ops)
            at = starts[at].stop
            continue
        if row.again:
            _verify_again(program.graph, index, row, held, updated)
            index += 1
            continue
        step = program.steps[at] if at < len(program.steps) else None
        wants = None if step is None else (step.kind, step.op, step.accumulate, step.second)
        if step is None or wants != (row.kind, row.op, row.accumulate, row.second):
            raise TableError(index, row, f"the program's step is {step}")
        _verify_step(program.graph, index, row, step, wanted, held)
        if row.kind in (StepKind.WEIGHT, StepKind.BIAS):
            updated.add(row.op)
        at, index = at + 1, index + 1
    if at < len(program.steps) and rows:
        raise TableError(len(rows) - 1, rows[-1], "the table ends before its program")
    pages.finish(rows)
    verify_parameters(rows)


def _verify_group(
    program: SampleProgram,
    group: TileGroup,
    rows: Sequence[TableRow],
    span: tuple[int, int],
    wanted: dict[str, int],
    held: dict[str, Contents],
) -> int:
    """Verify the rows of a group, which may be followed by another group's; return the row after them."""
    updates = sum(s.kind in (StepKind.WEIGHT, StepKind.BIAS) for s in program.steps[group.start : group.stop])
    index = span[0]
    while index < span[1] and updates:
        updates -= rows[index].kind in (StepKind.WEIGHT, StepKind.BIAS) and not rows[index].suspends
        index += 1
    read, written = group_tensors(program, group)
    now = {name: (tensor, count) for name, (tensor, count) in held.items()}
    whole = {name: tensor for name, (tensor, count) in now.items() if tensor in read and count == wanted[tensor]}
    TileVerifier(program, group, whole).run(tuple(rows[span[0] : index]))
    targets = {row.target for row in rows[span[0] : index] if row.target and not row.target.startswith("band:")}
    for tensor in written:
        wanted[tensor] = wanted.get(tensor, 0) + 1
    for name in targets:
        held[name] = (written[0], wanted[written[0]])
    return index


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
                index, row, f"reads {operands[name]}, which holds {held.get(operands[name])}, not the current {name}"
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
    if row.kind is StepKind.INPUT and row.other:
        found[op.inputs[1]] = row.other
    if row.output:
        found[row.op] = row.output
    return found


def forward_rows(rows: Sequence[TableRow]) -> int:
    """Return how many rows inference runs: those before the loss."""
    return next((index for index, row in enumerate(rows) if row.kind is StepKind.LOSS), len(rows))
