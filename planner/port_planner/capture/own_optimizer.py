"""Record the update of an optimizer of any class, and its numbers for each future step.

A copy of the optimizer steps on meta tensors, which have shapes but no contents. So nothing that it does can depend on
the values of weights or gradients; otherwise it is rejected by name, or replaced (`rewritten_steps`). All updates can
therefore run during planning, and the numbers among the operators' arguments (learning rate, bias corrections) go into
the bundle as a table. The worker needs none of the optimizer's code.
"""

import copy
import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from port_planner.base.errors import CaptureError, of_the_program
from port_planner.capture.masked_gradients import is_plain
from port_planner.capture.python_state import StateOfCode
from port_planner.capture.recorder import OPTIMIZER_REMEDY, RecordedOp, StepRecorder, Tape
from port_planner.capture.rerecord_check import other_generators_untouched
from port_planner.capture.rewritten_steps import rewritten_step
from port_planner.ir.graph import Argument, Phase, Ref, Role, Scalar, references
from port_planner.ir.lowering.optimizer_scalars import RecordedNumbers, Schedule, restored
from port_planner.operators import operator_of
from port_planner.operators.row import Filling
from port_planner.torch_compat.modes import without_modes
from port_planner.torch_compat.optimizers import drop_step_hooks, is_scheduled_step

_REMEDY = f"a bundle cannot reproduce that; {OPTIMIZER_REMEDY}"

_MIN_UPDATES = 3
"""Least number of updates that are compared: the first creates the state, the second uses it, and the third shows
that nothing keeps changing.
"""

_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that an optimizer's code may raise on tensors without contents."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that an optimizer keeps for a parameter, and its single initial value; None: it begins
    as a copy of the parameter.
    """

    parameter: torch.Tensor
    name: str
    tensor: torch.Tensor
    fill: float | None


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """An optimizer's update: for each parameter, its operators with slots for their numbers, and these numbers."""

    updates: Mapping[torch.Tensor, tuple[RecordedOp, ...]]
    states: tuple[StateTensor, ...]
    numbers: RecordedNumbers


@dataclass(frozen=True, slots=True)
class _Form:
    """The operations of a parameter's update without its floats, and the floats in the order of the operators."""

    shape: tuple[Any, ...]
    floats: tuple[float, ...]


def record_update(
    recorder: StepRecorder,
    optimizer: torch.optim.Optimizer,
    stand_ins: Mapping[torch.Tensor, torch.Tensor],
    names: Mapping[torch.Tensor, str],
    schedule: Schedule,
) -> RecordedUpdate:
    """Record an update of all parameters at once.

    `stand_ins`: for each parameter with a gradient, a meta tensor and its `grad`. `names`: names of the parameters.
    `schedule`: changes of the groups in each future update. Raises CaptureError if the update depends on contents or on
    the number of updates, mixes parameters, or has state other than tensors changed in place.
    """
    rows = [schedule[min(i, len(schedule) - 1)] if schedule else () for i in range(max(len(schedule), _MIN_UPDATES))]
    shadow = _Shadow(optimizer, stand_ins)
    tracked, changing = list[dict[torch.Tensor, list[RecordedOp]]](), list[frozenset[str]]()
    for row in rows[:2]:
        code = StateOfCode(arguments=False)
        with code.watched():
            tracked.append(shadow.step(recorder, row, names))
        changing.append(code.changed())
    if counting := sorted(changing[0] & changing[1]):
        raise CaptureError(
            f"{shadow.name} changes {', '.join(counting)} in each step, which is not part of it: {_REMEDY}"
        )
    first, second = (
        {p: _form(recorder.tape, ops, shadow.labels(recorder, p)) for p, ops in t.items()} for t in tracked
    )
    for p in stand_ins:
        if not second[p].shape:
            raise CaptureError(f"{shadow.name} does not change {names[p]}, which has a gradient: {_REMEDY}")
        if first[p].shape != second[p].shape:
            raise CaptureError(
                f"{shadow.named_where(*(t[p] for t in tracked))}'s first update runs different operators from its second: {_REMEDY}"
            )
    kinds: dict[Any, list[torch.Tensor]] = {}
    for p in stand_ins:
        kinds.setdefault((shadow.group_of(p), p.shape, p.stride(), p.dtype, second[p].shape), []).append(p)
    members = [*kinds.values()]
    chosen = {alike[0]: stand_ins[alike[0]] for alike in members}
    columns, settled, remembered = _tabulated(optimizer, chosen, names, rows, second, recorder.stand_in_device)
    if remembered[1] != shadow.plain_memory():
        raise CaptureError(f"{shadow.name} has state that depends on its number of parameters: {_REMEDY}")
    updates: dict[torch.Tensor, tuple[RecordedOp, ...]] = {}
    slot = 0
    for alike in members:
        used = len(second[alike[0]].floats)
        for p in alike:
            for i, forms in enumerate((first, second)):
                if repr([column[i] for column in columns[slot : slot + used]]) != repr([*forms[p].floats]):
                    raise CaptureError(
                        f"{shadow.name} updates {names[p]} with different numbers from {names[alike[0]]}, which has "
                        f"the same shape: {_REMEDY}"
                    )
            updates[p], _ = with_slots(tracked[1][p], slot, (float,))
        slot += used
    if not all(math.isfinite(number) for column in columns for number in column):
        raise CaptureError(f"{shadow.name} computes with a number that is infinite or NaN: {_REMEDY}")
    numbers = tuple(column[0] if len({repr(n) for n in column}) == 1 else tuple(column) for column in columns)
    return RecordedUpdate(updates, tuple(shadow.states), RecordedNumbers(numbers, None if settled else len(rows)))


def _tabulated(
    optimizer: torch.optim.Optimizer,
    stand_ins: Mapping[torch.Tensor, torch.Tensor],
    names: Mapping[torch.Tensor, str],
    rows: Schedule,
    expected: Mapping[torch.Tensor, _Form],
    device: str,
) -> tuple[list[list[float]], bool, list[list[str]]]:
    """Return each number's values over the updates, whether they stay at the last one, and the optimizer's
    memory after each update.

    They stay constant once an update leaves the optimizer's memory unchanged.
    """
    shadow = _Shadow(optimizer, stand_ins)
    columns: list[list[float]] = [[] for p in stand_ins for _ in expected[p].floats]
    remembered: list[list[str]] = []
    settled = False
    before_it = dict[torch.Tensor, list[RecordedOp]]()
    for i, row in enumerate(rows):
        recorder = StepRecorder()
        recorder.phase, recorder.reads_numbers, recorder.stand_in_device = Phase.UPDATE, True, device
        shadow.register(recorder)
        before = shadow.memory(row)
        tracked = shadow.step(recorder, row, names)
        settled = before == shadow.memory(row)
        if i < _MIN_UPDATES:
            remembered.append(shadow.plain_memory())
        numbers: list[float] = []
        for p in stand_ins:
            form = _form(recorder.tape, tracked[p], shadow.labels(recorder, p))
            if form.shape != expected[p].shape:
                name = shadow.named_where(before_it.get(p, ()), tracked[p])
                raise CaptureError(f"{name} runs different operators in update {i + 1} from those before: {_REMEDY}")
            numbers += form.floats
        for column, number in zip(columns, numbers, strict=True):
            column.append(number)
        if settled and all(later == row for later in rows[i:]) and i + 1 >= _MIN_UPDATES:
            break
        before_it = tracked
    return columns, settled, remembered


class _Shadow:
    """A copy of an optimizer over stand-ins for some of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, stand_ins: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self.kind = f"the optimizer {type(optimizer).__name__}"
        self.name = f"{_line_of_class(optimizer)}{self.kind}"
        if optimizer.state:
            raise CaptureError(f"{self.name} has already made steps; create a new one, or train with `port-agent exec`")
        step = vars(optimizer).get("step")
        if step is not None and not is_scheduled_step(step):
            raise CaptureError(f"{self.name} has a step() set on the instance, not defined by its class: {_REMEDY}")
        self._stand_ins = stand_ins
        self._gradients = {p: s.grad for p, s in stand_ins.items()}
        self.states: list[StateTensor] = []
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        self._shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
        with without_modes():
            absent = {p: torch.empty_like(p, device="meta") for p in everything if p not in stand_ins}
            memo: dict[int, Any] = {id(p): stand_in for p, stand_in in {**absent, **stand_ins}.items()}
            memo[id(optimizer)] = self._shadow
            contents = {key: value for key, value in vars(optimizer).items() if key != "step"}
            try:
                vars(self._shadow).update(copy.deepcopy(contents, memo))
            except _ERRORS as error:
                raise CaptureError(f"{self.name} cannot be copied ({error}): {_REMEDY}") from error
            drop_step_hooks(self._shadow)
            for stand_in in stand_ins.values():
                stand_in.requires_grad_()
        self._groups = {p: g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for group in self._shadow.param_groups:
            group["params"] = [p for p in group["params"] if any(p is s for s in stand_ins.values())]

    def named_where(self, expected: Sequence[RecordedOp], found: Sequence[RecordedOp]) -> str:
        """Return the optimizer's name, with the line of the first operator of an update that
        differs from the expected one.
        """
        for was, now in zip_longest(expected, found):
            if was is None or now is None or was.name != now.name:
                place = next((op.line for op in (now, was) if op is not None and op.line), "")
                return f"{place}: {self.kind}" if place else self.name
        return self.name

    def group_of(self, parameter: torch.Tensor) -> int:
        return self._groups[parameter]

    def register(self, recorder: StepRecorder) -> None:
        """Register parameters, gradients and state with a recorder."""
        for i, (p, stand_in) in enumerate(self._stand_ins.items()):
            recorder.add(stand_in, Role.PARAMETER, str(i))
            gradient = self._gradients[p]
            if gradient is not None:
                recorder.add(gradient, Role.GRADIENT, str(i))
        for state in self.states:
            recorder.add(state.tensor, Role.STATE, state.name)

    def labels(self, recorder: StepRecorder, parameter: torch.Tensor) -> dict[int, str]:
        """Return the role of each storage of one parameter in its update."""
        found = {self._storage(recorder, self._stand_ins[parameter]): "the parameter"}
        gradient = self._gradients[parameter]
        if gradient is not None:
            found[self._storage(recorder, gradient)] = "its gradient"
        for state in self.states:
            if state.parameter is parameter:
                found[self._storage(recorder, state.tensor)] = f"state {state.name}"
        return found

    def step(
        self, recorder: StepRecorder, row: Sequence[Mapping[str, Any]], names: Mapping[torch.Tensor, str]
    ) -> dict[torch.Tensor, list[RecordedOp]]:
        """Make an update with the hyperparameters of a row of the schedule; return the operators of each parameter."""
        for group, changed in zip(self._shadow.param_groups, row, strict=False):
            group.update(restored(changed))
        tape, start = recorder.tape, len(recorder.tape.ops)
        known = {self._storage(recorder, t) for t in self._tensors()}
        storages = len(tape.storages)
        places = {p: s.untyped_storage() for p, s in self._stand_ins.items()}
        for p, stand_in in self._stand_ins.items():
            stand_in.grad = self._gradients[p]
        try:
            with other_generators_untouched(), recorder:
                rewritten = rewritten_step(self._shadow)
                if rewritten is None:
                    type(self._shadow).step(self._shadow)
                else:
                    rewritten(self._shadow, recorder)
        except _ERRORS as error:
            raise CaptureError(
                f"{self.name} cannot make a step on tensors without contents ({error}): {_REMEDY}"
            ) from error
        ops = tape.ops[start:]
        del tape.ops[start:]
        if any(s.untyped_storage() is not places[p] for p, s in self._stand_ins.items()):
            raise CaptureError(f"{self.name} replaces parameters by other tensors (p.data = ...): {_REMEDY}")
        ops = self._take_state(recorder, ops, names)
        known |= {self._storage(recorder, state.tensor) for state in self.states}
        for op in ops:
            strange = [s for s in _touched(tape, op) if s < storages and s not in known]
            if op.random or strange or any(tape.storages[s].role is Role.CONSTANT for s in _touched(tape, op)):
                what = "draws random numbers" if op.random else "uses a tensor that is not a valid state of a parameter"
                raise CaptureError(
                    f"{f'{op.line}: {self.kind}' if op.line else self.name} {what} ({op.name}): {_REMEDY}"
                )
        return self._by_parameter(recorder, ops)

    def _tensors(self) -> list[torch.Tensor]:
        gradients = [g for g in self._gradients.values() if g is not None]
        return [*self._stand_ins.values(), *gradients, *(state.tensor for state in self.states)]

    def _take_state(
        self, recorder: StepRecorder, ops: list[RecordedOp], names: Mapping[torch.Tensor, str]
    ) -> list[RecordedOp]:
        """Record the state that the step created, and drop the operators that filled it or
        whose result nothing reads.
        """
        tape = recorder.tape
        kept = {(state.parameter, state.name): state.tensor for state in self.states}
        fresh = not self.states
        made: set[int] = set()
        for p, stand_in in self._stand_ins.items():
            for name, value in self._shadow.state.get(stand_in, {}).items():
                if not isinstance(value, torch.Tensor) or value is kept.get((p, name)):
                    continue
                what = f"{self.name} keeps {name!r} of {names[p]}"
                if not fresh:
                    raise CaptureError(
                        f"{what} in a new tensor after each step instead of changing it in place: {_REMEDY}"
                    )
                storage = self._storage(recorder, value)
                fill = _first_value(tape, ops, storage, value)
                copied = fill is None and _is_copied(tape, ops, recorder.value_of(value), recorder.value_of(stand_in))
                if (fill is None and not copied) or storage in made:
                    raise CaptureError(
                        f"{what}, which starts neither as a constant nor as a copy of the parameter: {_REMEDY}"
                    )
                made.add(storage)
                stored = tape.storages[storage]
                stored.role, stored.name, stored.data = Role.STATE, f"{names[p]}/{name}", None
                self.states.append(StateTensor(p, name, value, fill))
        uses = Counter(storage for op in ops for storage in _touched(tape, op))
        dropped = made | {s for s, count in uses.items() if count == 1 and tape.storages[s].role is Role.TEMPORARY}
        return [
            op
            for op in ops
            if op.writes or not {tape.values[v].storage for v in op.outputs if v is not None} <= dropped
        ]

    def _by_parameter(self, recorder: StepRecorder, ops: Sequence[RecordedOp]) -> dict[torch.Tensor, list[RecordedOp]]:
        """Return the operators of each parameter, by what they read and write; raise CaptureError for an operator
        that serves two parameters.
        """
        tape, above = recorder.tape, dict[int, int]()
        shared = self._shared_gradients(recorder)
        if any(storage in shared for op in ops for storage in op.writes):
            raise CaptureError(f"{self.name} changes a gradient that shares memory with another: {_REMEDY}")

        def root(storage: int) -> int:
            while above.get(storage, storage) != storage:
                storage = above[storage]
            return storage

        touched = [[s for s in _touched(tape, op) if s not in shared] for op in ops]
        for storages in touched:
            for other in storages[1:]:
                above[root(other)] = root(storages[0])
        owner: dict[int, torch.Tensor] = {}
        for p in self._stand_ins:
            for storage in self.labels(recorder, p).keys() - shared:
                if owner.setdefault(root(storage), p) is not p:
                    raise CaptureError(
                        f"{self.name} computes with several parameters, or their gradients, at once: {_REMEDY}"
                    )
        found: dict[torch.Tensor, list[RecordedOp]] = {p: [] for p in self._stand_ins}
        for op, storages in zip(ops, touched, strict=True):
            owned_by = owner.get(root(storages[0])) if storages else None
            if owned_by is not None:
                found[owned_by].append(op)
        return found

    def _shared_gradients(self, recorder: StepRecorder) -> set[int]:
        """Return the storages that contain gradients of several parameters."""
        counts = Counter(self._storage(recorder, g) for g in self._gradients.values() if g is not None)
        return {storage for storage, count in counts.items() if count > 1}

    def memory(self, row: Sequence[Mapping[str, Any]]) -> Any:
        """Return everything on which the next update may depend, except tensors without contents and
        the values that `row` sets.
        """
        contents = {k: v for k, v in vars(self._shadow).items() if k != "param_groups"}
        scheduled: list[Mapping[str, Any]] = [*row, *({} for _ in self._shadow.param_groups[len(row) :])]
        groups = [
            {k: v for k, v in group.items() if k not in changed}
            for group, changed in zip(self._shadow.param_groups, scheduled, strict=True)
        ]
        return _frozen([contents, groups])

    def plain_memory(self) -> list[str]:
        """Return the numbers and names that the optimizer remembers besides its per-parameter state."""
        known = {id(s) for s in self._stand_ins.values()}
        state = {key: value for key, value in self._shadow.state.items() if id(key) not in known}
        return [*_plain([{**vars(self._shadow), "state": state}])]

    @staticmethod
    def _storage(recorder: StepRecorder, tensor: torch.Tensor) -> int:
        return recorder.tape.values[recorder.value_of(tensor)].storage


def _line_of_class(optimizer: torch.optim.Optimizer) -> str:
    """Return "train.py:12: " if the program defines the optimizer's class; "" for a class of a library."""
    kind = type(optimizer)
    with suppress(OSError, TypeError):  # a class that no file defines
        file = inspect.getsourcefile(kind)
        if file is not None and of_the_program(file):
            return f"{Path(file).name}:{inspect.getsourcelines(kind)[1]}: "
    return ""


def _frozen(item: Any) -> Any:
    """Return a value that compares equal while the item is unchanged; for unknown kinds of
    objects, a value that never does.
    """
    if isinstance(item, torch.Tensor):
        contents = b"" if item.is_meta else item.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (id(item), id(item.untyped_storage()), contents)
    if isinstance(item, Mapping):
        return tuple((_frozen(key), _frozen(value)) for key, value in item.items())
    if isinstance(item, list | tuple):
        return tuple(map(_frozen, item))
    if item is None or isinstance(item, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return repr(item)
    plain: tuple[type, ...] = (type, FunctionType, BuiltinFunctionType, MethodType)
    return id(item) if isinstance(item, plain) else object()


def _plain(item: Any) -> Iterator[str]:
    if isinstance(item, Mapping):
        for key, value in item.items():
            yield from _plain(key)
            yield from _plain(value)
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _plain(part)
    elif isinstance(item, bool | int | float | complex | str):
        yield repr(item)


def _touched(tape: Tape, op: RecordedOp) -> dict[int, None]:
    """Return the storages that an operator reads, writes or makes, in order."""
    values = [v for a in (*op.args, *(a for _, a in op.kwargs)) for v in references(a)]
    values += [v for v in op.outputs if v is not None]
    return dict.fromkeys([*(tape.values[v].storage for v in values), *op.writes])


def _first_value(tape: Tape, ops: Sequence[RecordedOp], storage: int, tensor: torch.Tensor) -> float | None:
    """Return the number that fills a tensor when a step creates it, or None if there is no such number."""
    data = tape.storages[storage].data
    if data is not None:
        values = data.view(tensor.dtype).unique()
        return float(values.item()) if values.numel() == 1 else None
    for op in ops:
        if storage in _touched(tape, op):
            known = operator_of(op.name)
            if known.fill in (Filling.ZEROS, Filling.ONES):
                return float(known.fill is Filling.ONES)
            number = op.args[known.fill_number] if known.fill_number is not None else None
            return float(number) if isinstance(number, int | float) else None
    return None


def _is_copied(tape: Tape, ops: Sequence[RecordedOp], state: int, parameter: int) -> bool:
    """Return whether a value begins as a copy of a whole contiguous parameter that nothing has changed before."""
    kept, of = tape.values[state], tape.values[parameter]
    if replace(kept, storage=of.storage, offset=of.offset) != of or not is_plain(of):
        return False
    for op in ops:
        if kept.storage in _touched(tape, op):
            return op.name == "aten::clone" and op.args[0] == Ref(parameter) and op.outputs == (state,)
        if of.storage in op.writes:
            return False
    return False


def _form(tape: Tape, ops: Sequence[RecordedOp], labels: Mapping[int, str]) -> _Form:
    floats: list[float] = []
    places: dict[int, str | int] = dict(labels)

    def described(value: int) -> Any:
        v = tape.values[value]
        return (places.setdefault(v.storage, len(places)), replace(v, storage=0))

    def spelled(argument: Argument) -> Any:
        if isinstance(argument, float):
            floats.append(argument)
            return float
        if isinstance(argument, Ref):
            return described(argument.value)
        return tuple(map(spelled, argument)) if isinstance(argument, tuple) else repr(argument)

    shape = tuple(
        (
            op.name,
            tuple(map(spelled, op.args)),
            tuple((key, spelled(a)) for key, a in op.kwargs),
            tuple(None if v is None else described(v) for v in op.outputs),
            tuple(places.setdefault(s, len(places)) for s in op.writes),
        )
        for op in ops
    )
    return _Form(shape, tuple(floats))


def with_slots(
    ops: Sequence[RecordedOp], first: int, kinds: tuple[type, ...] = (int, float)
) -> tuple[tuple[RecordedOp, ...], int]:
    """Replace the numbers of these kinds among the arguments by per-step scalars `first`, `first + 1`,
    ...; return their number.
    """
    count = 0

    def convert(argument: Argument) -> Argument:
        nonlocal count
        if isinstance(argument, kinds) and not isinstance(argument, bool):
            count += 1
            return Scalar(first + count - 1)
        if isinstance(argument, tuple):
            return tuple(convert(a) for a in argument)
        return argument

    result = tuple(
        RecordedOp(
            op.name,
            tuple(convert(a) for a in op.args),
            tuple((k, convert(v)) for k, v in op.kwargs),
            op.outputs,
            op.writes,
            op.phase,
            op.random,
        )
        for op in ops
    )
    return result, count
