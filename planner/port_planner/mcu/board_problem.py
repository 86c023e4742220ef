"""A training step of a board as a planning problem: one stage per step or group, one tensor
per activation and gradient.

Weights are tensors without bytes: they stay where they are. Each is still written at its update, so that the replay
rejects an operator that would run again with weights it did not have the first time. Weights that live on a page medium
have bytes while they are in the arena. Reading them again before their update is their recomputation; the first read
and the last write are part of the cost of their stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from port_planner.mcu.arena import aligned
from port_planner.mcu.autodiff import SampleProgram, SparseScheme, StepKind, TableRow, reads, writes
from port_planner.mcu.core_costs import CoreCosts, row_seconds
from port_planner.mcu.ir import scratch_bytes
from port_planner.mcu.memory import board_tensor_bytes, parameter_block_bytes
from port_planner.mcu.page_costs import PageCosts
from port_planner.mcu.pages import UPDATES, BoardPaging, PageTransfer, is_parameters, parameter_name
from port_planner.mcu.step_table import RepeatedOps, home
from port_planner.mcu.tiles import TileGroup, group_rows, group_tensors
from port_planner.problem.problem import (
    Choice,
    GapDecision,
    Problem,
    Rematerialization,
    Schedule,
    Semantics,
    Stage,
    Tensor,
    verify_problem,
)
from port_planner.problem.replay import read_window, write_window


@dataclass(frozen=True, slots=True)
class Unit:
    """The steps for which one stage stands: one step, or a group."""

    start: int
    stop: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    seconds: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Media to which a plan may page; `parameters`: the trained parameters live there."""

    costs: PageCosts
    parameters: bool = False


@dataclass(frozen=True)
class BoardProblem:
    """A problem and its program; `names` are those of its tensors, `starts` the first step of each stage."""

    program: SampleProgram
    problem: Problem
    names: tuple[str, ...]
    starts: tuple[int, ...]
    groups: tuple[TileGroup, ...] = ()
    pages_parameters: bool = False

    def paging(self, schedule: Schedule) -> BoardPaging:
        """Return the page transfers of a schedule, in steps of the program."""
        paged: set[tuple[int, int]] = set()
        transfers = []
        for choice in sorted(schedule.choices, key=lambda c: self.problem.gaps[c.gap].after):
            if choice.decision is GapDecision.PAGE:
                gap = self.problem.gaps[choice.gap]
                contents = gap.tensor, gap.version
                transfers.append(self._transfer(choice, contents not in paged))
                paged.add(contents)
        return BoardPaging(tuple(transfers), self.pages_parameters)

    def _transfer(self, choice: Choice, first: bool) -> PageTransfer:
        problem, gap = self.problem, self.problem.gaps[choice.gap]
        cost = problem.tensors[gap.tensor].paging[0]
        reads = [stage for stage, _ in read_window(problem, gap, choice.stage, cost.seconds_in)]
        out = None
        if first:
            writes = [stage for stage, _ in write_window(problem, gap, cost.seconds_out)]
            out = self.starts[gap.after + 1], self.starts[max(writes) + 1]
        return PageTransfer(self.names[gap.tensor], out, (self.starts[min(reads)], self.starts[choice.stage]))

    def recomputation(self, schedule: Schedule) -> RepeatedOps:
        """Return what a schedule recomputes before which step, inputs first."""
        wanted: dict[int, set[int]] = {}
        for choice in schedule.choices:
            if choice.decision is GapDecision.RECOMPUTE:
                tensor = self.problem.gaps[choice.gap].tensor
                wanted.setdefault(self.starts[choice.stage], set()).add(tensor)
        for tensor, stage in schedule.intermediates:
            wanted.setdefault(self.starts[stage], set()).add(tensor)
        return RepeatedOps(
            {
                stage: tuple(self.names[i] for i in sorted(found, key=self._first_made))
                for stage, found in wanted.items()
            }
        )

    def _first_made(self, tensor: int) -> tuple[int, bool]:
        return self.problem.tensors[tensor].birth, not is_parameters(self.names[tensor])


def board_problem(
    program: SampleProgram,
    scheme: SparseScheme,
    costs: CoreCosts,
    arena_bytes: int,
    *,
    simd: bool = True,
    groups: Sequence[TileGroup] = (),
    known: dict[int | TileGroup, Unit] | None = None,
    pages: PageOptions | None = None,
) -> BoardProblem:
    """Return the problem of running `program` with `arena_bytes` for everything but the trained parameters.

    Each of `groups` is one stage; its bands are the workspace. `known`: what steps and groups of this program took in
    earlier calls; extended here. `pages`: where tensors may be paged to; None: nowhere.

    Raises ProblemError if the program contradicts itself.
    """
    builder = _Builder(program, scheme, costs, simd, groups, {} if known is None else known, pages)
    stages = tuple(builder.stages())
    tensors = tuple(builder.tensor(name) for name in builder.names)
    problem = Problem(
        stages,
        tensors,
        arena_bytes,
        None,
        Semantics.REAL,
        costs.watts,
        name=program.graph.name,
    )
    verify_problem(problem)
    starts = tuple(u.start for u in builder.units)
    return BoardProblem(program, problem, tuple(builder.names), starts, tuple(groups), builder.pages_parameters)


RESUME_INSTRUCTIONS = 16.0
"""Cost of taking one sum out of memory and putting it back, once per band (counted on the emulated cores)."""


class _Builder:
    """Accesses and writes of every tensor, by stage."""

    def __init__(
        self,
        program: SampleProgram,
        scheme: SparseScheme,
        costs: CoreCosts,
        simd: bool,
        groups: Sequence[TileGroup],
        known: dict[int | TileGroup, Unit],
        pages: PageOptions | None,
    ) -> None:
        self.program, self.graph, self.scheme, self.costs, self.simd = program, program.graph, scheme, costs, simd
        self.pages = pages
        self.pages_parameters = pages is not None and pages.parameters
        self.units = list(self._units(groups, known))
        self.accesses: dict[str, list[int]] = {}
        self.writes: dict[str, list[int]] = {self.graph.input_name: [0]}
        self.born: dict[str, int] = {}
        for index, unit in enumerate(self.units):
            for name in dict.fromkeys((*unit.reads, *unit.writes)):
                self.accesses.setdefault(name, []).append(index)
            for name in dict.fromkeys(unit.writes):
                self.writes.setdefault(name, []).append(index)
            if program.steps[unit.start].kind is StepKind.FORWARD:
                self.born[program.steps[unit.start].op] = unit.start
        self.transfers = self._parameter_transfers()
        self.names = list(self.accesses)
        self.index = {name: i for i, name in enumerate(self.names)}

    def _units(self, groups: Sequence[TileGroup], known: dict[int | TileGroup, Unit]) -> Iterator[Unit]:
        starts = {group.start: group for group in groups}
        stop = 0
        for index in range(len(self.program.steps)):
            if index in starts:
                group = starts[index]
                stop = group.stop
                if group not in known:
                    known[group] = self._group(group)
                yield known[group]
            if index >= stop:
                if index not in known:
                    known[index] = self._step(index)
                yield known[index]

    def _step(self, index: int) -> Unit:
        step = self.program.steps[index]
        forward = step.kind is StepKind.FORWARD
        scratch = aligned(scratch_bytes(self.graph.op(step.op), self.simd)) if forward else 0
        if step.kind is StepKind.WEIGHT and self.scheme.chosen is not None:
            scratch = board_tensor_bytes(self.graph, f"norm:{step.op}", self.scheme)
        seconds = self.costs.seconds(self.graph, step, self.scheme)
        return Unit(index, index + 1, tuple(self._reads(index)), tuple(self._writes(index)), seconds, scratch)

    def _group(self, group: TileGroup) -> Unit:
        read, written = group_tensors(self.program, group)
        made = group_rows(self.program, group, {name: name for name in (*read, *written)}, self.simd)
        sums = {row.scratch for row in made.rows if row.suspends}
        scratch = max((scratch_bytes(self.graph.op(row.op), self.simd) for row in made.rows if row.again), default=0)
        own = sum(made.sizes.values()) + aligned(scratch)
        own += sum(aligned(board_tensor_bytes(self.graph, name, self.scheme)) for name in sums)
        steps = range(group.start, group.stop)
        weights = [n for i in steps for n in (*self._reads(i), *self._writes(i)) if is_parameters(n)]
        weights += [parameter_name(op) for op in group.ops if self._trained(op)]
        updated = [n for i in steps for n in self._writes(i) if is_parameters(n)]
        return Unit(
            group.start,
            group.stop,
            tuple(dict.fromkeys((*(home(self.graph, n) for n in read), *weights))),
            tuple(dict.fromkeys((*(home(self.graph, n) for n in written), *updated))),
            sum(self._row_seconds(row) for row in made.rows),
            own,
        )

    def _row_seconds(self, row: TableRow) -> float:
        seconds = row_seconds(self.graph, self.scheme, self.costs, row)
        if row.scratch and row.kind in (StepKind.WEIGHT, StepKind.BIAS):
            count = board_tensor_bytes(self.graph, row.scratch, self.scheme) / 4
            seconds += RESUME_INSTRUCTIONS * count * self.costs.seconds_per_instruction
        return seconds

    def _reads(self, index: int) -> Iterator[str]:
        step = self.program.steps[index]
        yield from (home(self.graph, name) for name in reads(self.graph, step))
        if step.kind in (StepKind.FORWARD, StepKind.INPUT) and self._trained(step.op):
            yield parameter_name(step.op)

    def _writes(self, index: int) -> Iterator[str]:
        step = self.program.steps[index]
        yield from (home(self.graph, name) for name in writes(self.graph, step))
        if step.kind in (StepKind.WEIGHT, StepKind.BIAS):
            yield parameter_name(step.op)

    def _trained(self, op: str) -> bool:
        update = self.scheme.of(op)
        return update.bias or update.rows > 0

    def _block(self, op: str) -> int:
        return parameter_block_bytes(self.graph.op(op), self.scheme.of(op))

    def _parameter_transfers(self) -> dict[int, tuple[float, float]]:
        """Return seconds and joules by stage of each layer's first parameter read and last parameter write."""
        found: dict[int, tuple[float, float]] = {}
        if self.pages is None or not self.pages_parameters:
            return found
        updates = {
            step.op: index
            for index, unit in enumerate(self.units)
            for step in self.program.steps[unit.start : unit.stop]
            if step.kind in UPDATES
        }
        for name, touched in self.accesses.items():
            op = name.removeprefix("p:")
            if not is_parameters(name):
                continue
            self.writes[name] = sorted({touched[0], *self.writes[name]})
            costs, nbytes = self.pages.costs, self._block(op)
            cost = costs.paging(nbytes)
            for stage, seconds, joules in (
                (touched[0], cost.seconds_in, cost.joules_in),
                (updates[op], cost.seconds_out, cost.joules_out),
            ):
                before = found.get(stage, (0.0, 0.0))
                found[stage] = before[0] + seconds, before[1] + costs.waited(nbytes, seconds, joules)
        return found

    def stages(self) -> Iterator[Stage]:
        for index, unit in enumerate(self.units):
            step = self.program.steps[unit.start]
            seconds, joules = self.transfers.get(index, (0.0, 0.0))
            joules += unit.seconds * self.costs.watts
            yield Stage(f"{step.kind.name} {step.op}", unit.seconds + seconds, joules, unit.workspace_bytes)

    def tensor(self, name: str) -> Tensor:
        accesses, written = tuple(self.accesses[name]), tuple(self.writes.get(name, ()))
        if is_parameters(name):
            return self._parameters(name, accesses, written)
        nbytes = aligned(board_tensor_bytes(self.graph, name, self.scheme))
        again: tuple[Rematerialization | None, ...] = ()
        if name in self.born and len(written) == 1:
            again = (self._rematerialization(name),)
        paging = () if self.pages is None else (self.pages.costs.paging(nbytes),)
        return Tensor(name, nbytes, accesses, written, rematerializations=again, paging=paging)

    def _parameters(self, name: str, accesses: tuple[int, ...], written: tuple[int, ...]) -> Tensor:
        if self.pages is None or not self.pages_parameters:
            return Tensor(name, 0, accesses, written, persistent=True, pinned=True)
        nbytes = self._block(name.removeprefix("p:"))
        cost = self.pages.costs.paging(nbytes)
        waited = self.pages.costs.waited(nbytes, cost.seconds_in, cost.joules_in)
        again = Rematerialization(cost.seconds_in, waited, ())
        return Tensor(name, nbytes, accesses, written, rematerializations=(again,))

    def _rematerialization(self, name: str) -> Rematerialization:
        index = self.born[name]
        op, step = self.graph.op(name), self.program.steps[index]
        inputs = [(self.index[source], 0) for source in op.inputs]
        if self._trained(name):
            inputs.append((self.index[parameter_name(name)], 0 if self.pages_parameters else -1))
        seconds = self.costs.seconds(self.graph, step, self.scheme)
        scratch = aligned(scratch_bytes(op, self.simd))
        return Rematerialization(seconds, seconds * self.costs.watts, tuple(inputs), scratch)
