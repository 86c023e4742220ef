"""Record what a program does in hooks after each step of its optimizer.

They really run on the model's own tensors, as forward and backward pass do, and their changes are then
restored. During recording, the update before them has not run, so a hook may depend on tensor contents only
through torch's operators. It runs twice and must do the same; the second time it runs with different numbers if
a schedule changes the optimizer's.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from port_planner.base.errors import CaptureError, StatefulStepError, place_of_function
from port_planner.capture.plain_formulas import plain_formulas
from port_planner.capture.python_state import StateOfCode
from port_planner.capture.reads import watch_reads
from port_planner.capture.recomputed import require_one_stream
from port_planner.capture.recorder import RecordedOp, StepRecorder, Tape, storage_identity
from port_planner.capture.rerecord_check import require_same, touched_storages, without_ops
from port_planner.ir.graph import PERSISTENT, Phase, Role
from port_planner.ir.lowering.optimizer_scalars import Schedule, hyperparameters, restored
from port_planner.torch_compat.optimizers import hooks_after_steps

_REMEDY = "let the loss function or the model do that, or train with `port-agent exec`, which runs the program itself"

_LASTING = frozenset({Role.PARAMETER, Role.BUFFER, Role.CONSTANT})
"""Roles of storages that exist after all updates."""


def record_hooks_after_steps(
    recorder: StepRecorder,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    *,
    may_count: bool = False,
) -> tuple[RecordedOp, ...]:
    """Run the hooks after the optimizer's step and return their operators, as parts of the update.

    `schedule`: the changes of the optimizer's groups before each future update. `may_count`: whether Python state is
    known to decide nothing. The caller restores parameters and buffers to which they write. Raises CaptureError if they
    do something that a bundle cannot repeat: with Python state, with a number that the schedule changes, or with
    tensors outside the model.
    """
    found = [
        _Run(recorder, model, optimizer, hook).recorded(_changed_numbers(schedule), may_count=may_count)
        for hook in hooks_after_steps(optimizer)
    ]
    return tuple(op for ops in found for op in ops)


def of_one_parameter(
    tape: Tape, ops: Sequence[RecordedOp], parameters: Set[int]
) -> tuple[dict[int, list[RecordedOp]], list[RecordedOp]]:
    """Return, by its storage, the operators that concern only one of these parameters, and the rest; each in order.

    They may run with the update of that parameter, because no other operator reads or writes what they touch.
    """
    above: dict[int, int] = {}

    def root(storage: int) -> int:
        while above.get(storage, storage) != storage:
            storage = above[storage]
        return storage

    touched = [
        [s for s in sorted(touched_storages(tape, op)) if tape.storages[s].role is not Role.CONSTANT] for op in ops
    ]
    for storages in touched:
        for other in storages[1:]:
            above[root(other)] = root(storages[0])
    lasting = {s for storages in touched for s in storages if tape.storages[s].role in PERSISTENT}
    met = Counter(map(root, lasting))
    drawing = {root(storages[0]) for op, storages in zip(ops, touched, strict=True) if op.random and storages}
    owners = {root(s): s for s in lasting & parameters if met[root(s)] == 1 and root(s) not in drawing}
    found: dict[int, list[RecordedOp]] = {}
    rest: list[RecordedOp] = []
    for op, storages in zip(ops, touched, strict=True):
        owner = owners.get(root(storages[0])) if storages else None
        (rest if owner is None else found.setdefault(owner, [])).append(op)
    return found, rest


class _Run:
    """The runs of one hook."""

    def __init__(
        self,
        recorder: StepRecorder,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        hook: Callable[..., Any],
    ) -> None:
        self._recorder, self._model, self._optimizer, self._hook = recorder, model, optimizer, hook
        self._what = f"{place_of_function(hook)}, a hook on the optimizer's steps,"
        self._parameters = dict(model.named_parameters())

    def recorded(self, other_numbers: Mapping[int, Mapping[str, Any]], *, may_count: bool) -> Sequence[RecordedOp]:
        """Return the operators of the hook.

        Raises CaptureError if a second run with different numbers in groups differs.
        """
        first, changing = self._run({})
        second, again = self._run(other_numbers)
        if (counting := sorted(changing & again)) and not may_count:
            raise StatefulStepError(str(self._refused(f"changes {', '.join(counting)} in Python each time")))
        tape = self._recorder.tape
        try:
            require_same(*(_alone(tape, ops) for ops in (first, second)))
        except CaptureError as error:
            scheduled = sorted({name for row in other_numbers.values() for name in row})
            numbers = f" (with another {', '.join(scheduled)}, which the scheduler changes)" if scheduled else ""
            raise self._refused(f"behaves differently when it runs again{numbers}: {error}") from error
        return first

    def _run(self, numbers: Mapping[int, Mapping[str, Any]]) -> tuple[list[RecordedOp], frozenset[str]]:
        """Return the operators of a run, and the names of the Python values that it changed."""
        recorder, tape, code = self._recorder, self._recorder.tape, StateOfCode()
        start, storages, state = len(tape.ops), len(tape.storages), recorder.generators()
        flags = {name: (p.requires_grad, p.data) for name, p in self._parameters.items()}
        tensors = self._tensors()
        with _with_numbers(self._optimizer, numbers), _without_state(self._optimizer, self._refused):
            groups = self._groups()
            with recorder, watch_reads(recorder.read), code.watched(), plain_formulas() as other_formulas:
                self._hook(self._optimizer, (), {})
            if self._groups() != groups:
                raise self._refused("changes the optimizer's groups")
        if self._tensors() != tensors:
            raise self._refused("replaces the model's tensors by others")
        if [name for name, p in self._parameters.items() if p.requires_grad != flags[name][0]] or other_formulas:
            raise self._refused("changes which gradients are computed")
        self._keep_replaced({name: data for name, (_, data) in flags.items()})
        ops = tape.ops[start:]
        del tape.ops[start:]
        if recorder.generators() != require_one_stream(ops, state):
            raise self._refused("sets torch's random generator")
        for op in ops:
            op.phase = Phase.UPDATE
            self._require_lasting(op, storages)
        return ops, code.changed()

    def _tensors(self) -> dict[str, int]:
        return {name: id(t) for name, t in (*self._model.named_parameters(), *self._model.named_buffers())}

    def _groups(self) -> list[tuple[list[int], dict[str, Any]]]:
        return [([*map(id, group["params"])], hyperparameters(group)) for group in self._optimizer.param_groups]

    def _keep_replaced(self, before: Mapping[str, torch.Tensor]) -> None:
        """Record that parameters receive the contents of the tensors that the hook assigned to
        `data`, and restore their own.
        """
        tape, copies = self._recorder.tape, list[tuple[int, int]]()
        for name, parameter in self._parameters.items():
            old, new = before[name], parameter.data
            if storage_identity(old.untyped_storage()) == storage_identity(new.untyped_storage()):
                continue
            source, target = self._recorder.value_of(new), self._recorder.value_of(old)
            values = tape.values[source], tape.values[target]
            like = replace(values[0], storage=0, offset=0) == replace(values[1], storage=0, offset=0)
            if not like or tape.storages[values[0].storage].role is not Role.TEMPORARY:
                raise self._refused(f"sets {name}.data to a tensor that it did not create, or that has another layout")
            copies.append((target, source))
            parameter.data = old
        places = Counter(tape.values[v].storage for copy in copies for v in copy)
        if any(count > 1 for count in places.values()):
            raise self._refused("sets the data of several parameters to one tensor")
        for target, source in copies:
            self._recorder.copy(target, source)

    def _require_lasting(self, op: RecordedOp, storages: int) -> None:
        """Raise CaptureError for an operator that uses a storage that no longer exists after updates; `storages`:
        those from before the hook.
        """
        tape = self._recorder.tape
        if any(s < storages and tape.storages[s].role not in _LASTING for s in touched_storages(tape, op)):
            raise self._refused(f"uses gradients, or results of the step or of another hook ({op.name} at {op.line})")
        if any(tape.storages[s].role is Role.CONSTANT for s in op.writes):
            raise self._refused(f"changes a tensor that does not belong to the model ({op.name} at {op.line})")

    def _refused(self, does: str) -> CaptureError:
        return CaptureError(f"{self._what} {does}, which a bundle cannot reproduce: {_REMEDY}")


def _alone(tape: Tape, ops: Sequence[RecordedOp]) -> Tape:
    """Return a tape with only these operators."""
    return without_ops(replace(tape, ops=[*ops], changing=frozenset()), ())


def _changed_numbers(schedule: Schedule) -> dict[int, dict[str, Any]]:
    """Return, by group, a later value of each number that differs from the first update."""
    found: dict[int, dict[str, Any]] = {}
    for row in schedule:
        for number, (was, now) in enumerate(zip(schedule[0], row, strict=True)):
            other = {name: value for name, value in now.items() if value != was.get(name)}
            if other:
                found.setdefault(number, {}).update(restored(other))
    return found


@contextmanager
def _with_numbers(optimizer: torch.optim.Optimizer, numbers: Mapping[int, Mapping[str, Any]]) -> Iterator[None]:
    before = [dict(group) for group in optimizer.param_groups]
    try:
        for number, changed in numbers.items():
            optimizer.param_groups[number].update(changed)
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group.update(values)


@contextmanager
def _without_state(optimizer: torch.optim.Optimizer, refused: Callable[[str], CaptureError]) -> Iterator[None]:
    """Hide the optimizer's `state`, which differs between recording and training, and reject hooks that access it."""
    state = vars(optimizer).pop("state")
    try:
        yield
    except AttributeError as error:
        if error.obj is optimizer and error.name == "state":
            raise refused("uses the optimizer's state") from error
        raise
    finally:
        optimizer.state = state
