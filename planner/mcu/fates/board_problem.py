"""A training step of a board as a planning problem: one stage per step, one tensor per activation and gradient.

Weights are tensors without bytes: they stay where they are, but each is written at its update, so that the replay
refuses an operator that would run again with weights it did not have the first time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.mcu.arena import aligned
from planner.mcu.autodiff import SampleProgram, SparseScheme, StepKind, reads, writes
from planner.mcu.fates.core_costs import CoreCosts
from planner.mcu.ir import scratch_bytes
from planner.mcu.memory import board_tensor_bytes
from planner.mcu.step_table import RepeatedOps, home
from planner.problem.model import Fate, Problem, Rematerialization, Schedule, Semantics, Stage, Tensor, verify_problem


@dataclass(frozen=True)
class BoardProblem:
    """A problem and the program whose steps are its stages; `names` are its tensors' in their order."""

    program: SampleProgram
    problem: Problem
    names: tuple[str, ...]

    def recomputation(self, schedule: Schedule) -> RepeatedOps:
        """Return what a schedule computes again before which step, inputs first."""
        wanted: dict[int, set[int]] = {}
        for choice in schedule.choices:
            if choice.fate is Fate.RECOMPUTE:
                wanted.setdefault(choice.stage, set()).add(self.problem.gaps[choice.gap].tensor)
        for tensor, stage in schedule.intermediates:
            wanted.setdefault(stage, set()).add(tensor)
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
    deadline_s: float | None = None,
) -> BoardProblem:
    """Return the problem of running `program` with `arena_bytes` for everything but the trained parameters.

    Raises ProblemError where the program contradicts itself.
    """
    builder = _Builder(program, scheme, costs, simd)
    stages = tuple(builder.stages())
    tensors = tuple(builder.tensor(name) for name in builder.names)
    problem = Problem(
        stages, tensors, arena_bytes, deadline_s, Semantics.REAL, costs.watts, name=program.graph.name,
    )  # fmt: skip
    verify_problem(problem)
    return BoardProblem(program, problem, tuple(builder.names))


def parameter_name(op: str) -> str:
    """Return the name of a layer's parameters."""
    return f"p:{op}"


class _Builder:
    """Accesses and writes of every tensor, by step."""

    def __init__(self, program: SampleProgram, scheme: SparseScheme, costs: CoreCosts, simd: bool) -> None:
        self.program, self.graph, self.scheme, self.costs, self.simd = program, program.graph, scheme, costs, simd
        self.accesses: dict[str, list[int]] = {}
        self.writes: dict[str, list[int]] = {self.graph.input_name: [0]}
        self.born: dict[str, int] = {}
        for index, step in enumerate(program.steps):
            for name in dict.fromkeys((*self._reads(index), *self._writes(index))):
                self.accesses.setdefault(name, []).append(index)
            for name in self._writes(index):
                self.writes.setdefault(name, []).append(index)
            if step.kind is StepKind.FORWARD:
                self.born[step.op] = index
        self.names = list(self.accesses)
        self.index = {name: i for i, name in enumerate(self.names)}

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
        for index, step in enumerate(self.program.steps):
            seconds = self.costs.seconds(self.graph, step, self.scheme)
            scratch = aligned(scratch_bytes(self.graph.op(step.op))) if self._uses_scratch(index) else 0
            yield Stage(f"{step.kind.name} {step.op}", seconds, seconds * self.costs.watts, scratch)

    def _uses_scratch(self, index: int) -> bool:
        return self.simd and self.program.steps[index].kind is StepKind.FORWARD

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
        scratch = aligned(scratch_bytes(op)) if self._uses_scratch(index) else 0
        return Rematerialization(seconds, seconds * self.costs.watts, tuple(inputs), scratch)
