"""A training step of a board as a planning problem: one stage per step or group, one tensor per activation and gradient.

Weights are tensors without bytes: they stay where they are, but each is written at its update, so that the replay
refuses an operator that would run again with weights it did not have the first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.mcu.arena import aligned
from planner.mcu.autodiff import SampleProgram, SparseScheme, Step, StepKind, TableRow, reads, writes
from planner.mcu.bands import BandGroup, group_rows, group_tensors
from planner.mcu.fates.core_costs import CoreCosts
from planner.mcu.ir import scratch_bytes
from planner.mcu.memory import board_tensor_bytes
from planner.mcu.step_table import RepeatedOps, home
from planner.problem.model import Fate, Problem, Rematerialization, Schedule, Semantics, Stage, Tensor, verify_problem


@dataclass(frozen=True, slots=True)
class Unit:
    """What one stage stands for: a step, or a group of them."""

    start: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    seconds: float
    workspace_bytes: int


@dataclass(frozen=True)
class BoardProblem:
    """A problem and its program; `names` are its tensors', `starts` the first step of each stage."""

    program: SampleProgram
    problem: Problem
    names: tuple[str, ...]
    starts: tuple[int, ...]
    groups: tuple[BandGroup, ...] = ()

    def recomputation(self, schedule: Schedule) -> RepeatedOps:
        """Return what a schedule computes again before which step, inputs first."""
        wanted: dict[int, set[int]] = {}
        for choice in schedule.choices:
            if choice.fate is Fate.RECOMPUTE:
                tensor = self.problem.gaps[choice.gap].tensor
                wanted.setdefault(self.starts[choice.stage], set()).add(tensor)
        for tensor, stage in schedule.intermediates:
            wanted.setdefault(self.starts[stage], set()).add(tensor)
        return RepeatedOps({
            stage: tuple(self.names[i] for i in sorted(found, key=lambda i: self.problem.tensors[i].birth))
            for stage, found in wanted.items()
        })  # fmt: skip


def board_problem(
    program: SampleProgram,
    scheme: SparseScheme,
    costs: CoreCosts,
    arena_bytes: int,
    *,
    simd: bool = True,
    groups: Sequence[BandGroup] = (),
    known: dict[int | BandGroup, Unit] | None = None,
) -> BoardProblem:
    """Return the problem of running `program` with `arena_bytes` for everything but the trained parameters.

    Each of `groups` is one stage, its bands its workspace. `known`: what steps and groups of this program were found to
    take before; filled in.

    Raises ProblemError where the program contradicts itself.
    """
    builder = _Builder(program, scheme, costs, simd, groups, {} if known is None else known)
    stages = tuple(builder.stages())
    tensors = tuple(builder.tensor(name) for name in builder.names)
    problem = Problem(
        stages, tensors, arena_bytes, None, Semantics.REAL, costs.watts, name=program.graph.name,
    )  # fmt: skip
    verify_problem(problem)
    return BoardProblem(program, problem, tuple(builder.names), tuple(u.start for u in builder.units), tuple(groups))


def parameter_name(op: str) -> str:
    """Return the name of a layer's parameters."""
    return f"p:{op}"


RESUME_INSTRUCTIONS = 16.0
"""Of taking one sum out of memory and putting it back, once per band (counted on the emulated cores)."""


class _Builder:
    """Accesses and writes of every tensor, by stage."""

    def __init__(
        self,
        program: SampleProgram,
        scheme: SparseScheme,
        costs: CoreCosts,
        simd: bool,
        groups: Sequence[BandGroup],
        known: dict[int | BandGroup, Unit],
    ) -> None:
        self.program, self.graph, self.scheme, self.costs, self.simd = program, program.graph, scheme, costs, simd
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
        self.names = list(self.accesses)
        self.index = {name: i for i, name in enumerate(self.names)}

    def _units(self, groups: Sequence[BandGroup], known: dict[int | BandGroup, Unit]) -> Iterator[Unit]:
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
        scratch = aligned(scratch_bytes(self.graph.op(step.op))) if self._uses_scratch(step.kind) else 0
        seconds = self.costs.seconds(self.graph, step, self.scheme)
        return Unit(index, tuple(self._reads(index)), tuple(self._writes(index)), seconds, scratch)

    def _group(self, group: BandGroup) -> Unit:
        read, written = group_tensors(self.program, group)
        made = group_rows(self.program, group, {name: name for name in (*read, *written)}, self.simd)
        sums = {row.scratch for row in made.rows if row.suspends}
        scratch = max((scratch_bytes(self.graph.op(row.op)) for row in made.rows if row.again and self.simd), default=0)
        own = sum(made.sizes.values()) + aligned(scratch)
        own += sum(aligned(board_tensor_bytes(self.graph, name, self.scheme)) for name in sums)
        steps = range(group.start, group.stop)
        weights = [n for i in steps for n in (*self._reads(i), *self._writes(i)) if n.startswith("p:")]
        weights += [parameter_name(op) for op in group.ops if self._trained(op)]
        updated = [n for i in steps for n in self._writes(i) if n.startswith("p:")]
        return Unit(
            group.start, tuple(dict.fromkeys((*(home(self.graph, n) for n in read), *weights))),
            tuple(dict.fromkeys((*(home(self.graph, n) for n in written), *updated))),
            sum(self._row_seconds(row) for row in made.rows), own,
        )  # fmt: skip

    def _row_seconds(self, row: TableRow) -> float:
        op = self.graph.op(row.op)
        height = op.in_shape.height if row.kind is StepKind.INPUT else op.out_shape.height
        first, last = (0, height) if row.span is None else row.span
        seconds = self.costs.seconds(self.graph, Step(row.kind, row.op), self.scheme) * (last - first) / height
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

    def stages(self) -> Iterator[Stage]:
        for unit in self.units:
            step = self.program.steps[unit.start]
            joules = unit.seconds * self.costs.watts
            yield Stage(f"{step.kind.name} {step.op}", unit.seconds, joules, unit.workspace_bytes)

    def _uses_scratch(self, kind: StepKind) -> bool:
        return self.simd and kind is StepKind.FORWARD

    def tensor(self, name: str) -> Tensor:
        accesses, written = tuple(self.accesses[name]), tuple(self.writes.get(name, ()))
        if name.startswith("p:"):
            return Tensor(name, 0, accesses, written, persistent=True, pinned=True)
        nbytes = aligned(board_tensor_bytes(self.graph, name, self.scheme))
        again: tuple[Rematerialization | None, ...] = ()
        if name in self.born and len(written) == 1:
            again = (self._rematerialization(name),)
        return Tensor(name, nbytes, accesses, written, rematerializations=again)

    def _rematerialization(self, name: str) -> Rematerialization:
        index = self.born[name]
        op, step = self.graph.op(name), self.program.steps[index]
        inputs = [(self.index[source], 0) for source in op.inputs]
        if self._trained(name):
            inputs.append((self.index[parameter_name(name)], -1))
        seconds = self.costs.seconds(self.graph, step, self.scheme)
        scratch = aligned(scratch_bytes(op)) if self.simd else 0
        return Rematerialization(seconds, seconds * self.costs.watts, tuple(inputs), scratch)
