"""Whether recordings of one step are equal.

A bundle repeats the operators, numbers and shapes of its recording for the whole job. So the step is recorded again on other rows and with
other random numbers. A part that is not the same each time would be frozen, and is therefore rejected.
"""

import hashlib
import pickle
import random
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from port_planner.base.errors import CaptureError, StatefulStepError
from port_planner.capture.python_state import StateOfCode
from port_planner.capture.recorder import RecordedOp, RecordedStorage, Tape, ViewCall
from port_planner.ir.allowed_operators import GUARD
from port_planner.ir.graph import Argument, Phase, Ref, Role, Value, operands, references, with_operands

_REMEDY = (
    "a bundle would repeat the first recording forever. Make it depend on the batch and on torch's random numbers alone, "
    "using torch's operators; or train with `port-agent exec`, which supports changing steps"
)

_FIRST_ALONE = " (where only the first step differs, as with observers of FakeQuantize, run the model once before port_job() returns)"
_MAX_NAMED = 3
_CALLED = "was called with"
"""Part of the message about an operator that was called with other numbers."""


def require_same(first: Tape, other: Tape) -> None:
    """Raise CaptureError, with the program's line, for the first difference of two tapes of one step; StatefulStepError if it may be state
    only in Python.

    Compared are operators, their order, numbers and dependencies, shapes and layouts, and the contents of constants. Python variables that changed in both count further, and may decide something later.
    """
    if difference := first_difference(first, other):
        raise (StatefulStepError if _CALLED in difference else CaptureError)(f"{difference}: {_REMEDY}")
    if counting := sorted(first.changing & other.changing):
        raise StatefulStepError(
            f"the step changes {', '.join(counting[:_MAX_NAMED])} in Python each time, and a recording does not show "
            "what a later step decides by it. Keep counts in a buffer of the model, compute with torch's "
            "operators, or train with `port-agent exec`, which supports this"
        )


def first_difference(first: Tape, other: Tape) -> str:
    """Return, with the program's line, the first difference of two tapes of one step; "" if there is none.

    The tapes do not contain views. But if other views precede the first operator that differs, the steps part there.
    """
    for number, (mine, theirs) in enumerate(zip_longest(first.ops, other.ops)):
        difference = _difference(first, mine, other, theirs)
        if difference:
            op = theirs or mine
            line, what = _parted(first, other, number) or ("" if op is None else op.line, difference)
            of_gradient = (
                what is difference and op is not None and _is_of_a_gradient(other if op is theirs else first, op)
            )
            return f"{line}: {'the gradient here: ' * of_gradient}{what}" if line else difference
    return ""


def _is_of_a_gradient(tape: Tape, op: RecordedOp) -> bool:
    """Return whether the backward pass runs an operator, which does not put a result into a buffer."""
    return op.phase is Phase.BACKWARD and not any(tape.storages[s].role is Role.BUFFER for s in op.writes)


def _parted(first: Tape, other: Tape, until: int) -> tuple[str, str] | None:
    """Return the line and text of the first view that ran in only one of two steps, before or beside their operator `until`."""
    for mine, theirs in zip_longest(_calls(first, until), _calls(other, until)):
        was, now = ("" if call is None else call.name for call in (mine, theirs))
        if was != now and (ViewCall in (type(mine), type(theirs))):
            call = theirs or mine
            return None if call is None else (call.line, _other_call(mine, theirs))
    return None


def _calls(tape: Tape, until: int) -> list[RecordedOp | ViewCall]:
    """Return the operators of the forward pass up to the one of this number, and the views among them."""
    calls: list[tuple[int, int, RecordedOp | ViewCall]] = [
        (i, 1, op) for i, op in enumerate(tape.ops[: until + 1]) if op.phase is Phase.FORWARD
    ]
    calls += [(view.before, 0, view) for view in tape.views if view.before <= until]
    return [call for _, _, call in sorted(calls, key=lambda item: item[:2])]


def _other_call(mine: RecordedOp | ViewCall | None, theirs: RecordedOp | ViewCall | None) -> str:
    """Say that calls of two tapes at the same place have different names."""
    if mine is not None and theirs is not None:
        place = f" (at {mine.line})" if mine.line not in ("", theirs.line) else ""
        return f"{theirs.name} ran where {mine.name}{place} ran in another recording of the step"
    call = mine or theirs
    return f"{'' if call is None else call.name} ran in one recording of the step and not in another"


def require_same_but_for_sums(first: Tape, other: Tape) -> None:
    """Raise CaptureError unless a step that adds to existing gradients is otherwise the same, as in all but an update's first batch.

    Also raises CaptureError if the step uses those gradients for anything else.
    """
    sums = [op for op in other.ops if _adds_to_gradient(other, op)]
    added = frozenset(other.values[v].storage for op in sums for v in references(op.args[1]))
    alone = without_ops(other, [*sums, *_last_copies(other, added)])
    for op in alone.ops:
        if any(alone.storages[s].role is Role.GRADIENT for s in touched_storages(alone, op)):
            raise CaptureError(
                f"{op.line}{': ' if op.line else ''}{op.name} reads a gradient that an earlier batch of the same "
                "update left, besides adding to it: a bundle only sums the gradients of its batches. Read them "
                "where the update is made, or train with `port-agent exec`, which runs the program itself"
            )
    require_same(without_ops(first, _last_copies(first, first.gradients)), alone)


def constants_of(tape: Tape) -> tuple[str, ...]:
    """Describe each constant and name the operator that reads it first."""
    found: dict[int, str] = {}
    for op in tape.ops:
        for v in (v for a in (*op.args, *(a for _, a in op.kwargs)) for v in references(a)):
            value = tape.values[v]
            if tape.storages[value.storage].role is Role.CONSTANT:
                place = f" at {op.line}" if op.line else ""
                found.setdefault(value.storage, f"{value.dtype} {[*value.shape]} read by {op.name}{place}")
    return tuple(found.values())


def _difference(first: Tape, mine: RecordedOp | None, other: Tape, theirs: RecordedOp | None) -> str:
    """Return how two operators at the same place of two tapes differ; "" if they do not."""
    if mine is None or theirs is None or mine.name != theirs.name:
        return _other_call(mine, theirs)
    if mine.name == GUARD and mine.args[1] != theirs.args[1]:
        return f"a tensor's value is read in Python (.item(), bool()): {mine.args[1]!r}, then {theirs.args[1]!r}{_FIRST_ALONE}"
    mine_args, their_args = _arguments(mine), _arguments(theirs)
    for was, now in zip_longest(_spelled(mine_args), _spelled(their_args)):
        if was != now:
            if {was, now} & {None, "(", ")"} or [k for k, _ in mine.kwargs] != [k for k, _ in theirs.kwargs]:
                was, now = _arguments_shown(mine), _arguments_shown(theirs)
            return f"{mine.name} {_CALLED} {was} in one recording of the step and with {now} in another"
    mine_values = [*references(mine_args), *(v for v in mine.outputs if v is not None)]
    their_values = [*references(their_args), *(v for v in theirs.outputs if v is not None)]
    for a, b in zip_longest(mine_values, their_values):
        reason = "a different number of tensors" if a is None or b is None else _unlike(first, a, other, b)
        if reason:
            return f"{mine.name} works on {reason} in another recording of the step"
    if (mine.writes, mine.outputs, mine.phase) != (theirs.writes, theirs.outputs, theirs.phase):
        return f"{mine.name} writes elsewhere in another recording of the step"
    return ""


def _adds_to_gradient(tape: Tape, op: RecordedOp) -> bool:
    """Return whether this operator is autograd's sum of an existing gradient and the step's own."""
    if op.name != "aten::add_.Tensor" or op.phase is not Phase.BACKWARD or len(op.args) != 2 or op.kwargs:
        return False
    summed, own = op.args
    if not isinstance(summed, Ref) or not isinstance(own, Ref):
        return False
    roles = [tape.storages[tape.values[ref.value].storage].role for ref in (summed, own)]
    return roles[0] is Role.GRADIENT and roles[1] is not Role.GRADIENT


def _last_copies(tape: Tape, storages: Set[int]) -> list[RecordedOp]:
    """Return the operators that create gradients in these storages by copying, which autograd does if the original is referenced or has
    another layout.

    If a gradient already exists, it is added to instead.
    """
    found = list[RecordedOp]()
    for op, following in zip_longest(tape.ops, tape.ops[1:]):
        made = {tape.values[v].storage for v in op.outputs if v is not None}
        if op.phase is not Phase.BACKWARD or not made or not made <= storages:
            continue
        if op.name == "aten::clone":
            found.append(op)
        elif op.name == "aten::new_empty_strided" and following is not None and following.name == "aten::copy_":
            found += [op, following] if {*following.writes} == made else []
    return found


def without_ops(tape: Tape, ops: Sequence[RecordedOp]) -> Tape:
    """Return a tape without these operators, with values, storages and constants renumbered consecutively."""
    left_out = {id(op) for op in ops}
    kept = [op for op in tape.ops if id(op) not in left_out]
    values, storages = dict[int, int](), dict[int, int]()

    def storage(old: int) -> int:
        return storages.setdefault(old, len(storages))

    def value(old: int) -> int:
        storage(tape.values[old].storage)
        return values.setdefault(old, len(values))

    made = [
        replace(
            with_operands(op, value),
            outputs=tuple(None if v is None else value(v) for v in op.outputs),
            writes=tuple(sorted(storage(s) for s in op.writes)),
        )
        for op in kept
    ]
    found = [
        replace(tape.storages[old], name=f"constant{new}")
        if tape.storages[old].role is Role.CONSTANT
        else tape.storages[old]
        for old, new in storages.items()
    ]
    return Tape(
        found,
        [replace(tape.values[old], storage=storages[tape.values[old].storage]) for old in values],
        made,
        tape.draws_from,
        changing=tape.changing,
    )


def touched_storages(tape: Tape, op: RecordedOp) -> set[int]:
    """Return the storages that an operator reads, writes or creates."""
    values = [*references(_arguments(op)), *(v for v in op.outputs if v is not None)]
    return {*op.writes, *(tape.values[v].storage for v in values)}


def _arguments(op: RecordedOp) -> tuple[Argument, ...]:
    """Return an operator's arguments; for a guard, without the line, which in the backward pass is that of the caller."""
    if op.name == GUARD:
        return op.args[:2]
    return (*op.args, *(part for name, value in op.kwargs for part in (name, value)))


def _arguments_shown(op: RecordedOp) -> str:
    """Return an operator's arguments for a message."""
    named = [f"{name}={' '.join(_spelled(value))}" for name, value in op.kwargs]
    return f"({', '.join([' '.join(_spelled(value)) for value in op.args] + named)})"


def _spelled(argument: Argument) -> Iterator[str]:
    """Yield the parts of an argument, floats exactly, and tensors without their address."""
    if isinstance(argument, tuple):
        yield "("
        for part in argument:
            yield from _spelled(part)
        yield ")"
    else:
        yield "a tensor" if isinstance(argument, Ref) else repr(argument)


def _unlike(first: Tape, mine: int, other: Tape, theirs: int) -> str:
    a, b = first.values[mine], other.values[theirs]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"a tensor of {_shape(b)} instead of {_shape(a)}"
    if replace(a, storage=0) != replace(b, storage=0):
        return f"a tensor of {_shape(a)} with another layout"
    s, t = first.storages[a.storage], other.storages[b.storage]
    if a.storage != b.storage or (s.nbytes, s.role, s.name, s.device) != (t.nbytes, t.role, t.name, t.device):
        names = f" ({t.name} instead of {s.name})" if s.name != t.name and s.name and t.name else ""
        return f"another tensor of {_shape(a)}{names}"
    return (
        ""
        if _same_contents(s, t)
        else f"different contents of a tensor of {_shape(a)} that no operator of torch made in the thread of the step"
    )


def spelled_call(op: RecordedOp, without: Set[int | str] = frozenset()) -> str:
    """Return an operator's name and arguments, regardless of its tensors and of the values at these positions and keywords."""
    positional = enumerate(_arguments(op)[: len(op.args)])
    arguments: list[Any] = ["a number" if place in without else part for place, part in positional]
    arguments += [(name, "a number" if name in without else part) for name, part in op.kwargs]
    return repr((op.name, [*_spelled(tuple(arguments))]))


def spelled_tensors(tape: Tape, op: RecordedOp) -> str:
    """Return everything about an operator's tensors that `require_same` compares."""
    values = [tape.values[v] for v in (*operands(op), *(v for v in op.outputs if v is not None))]
    storages = [tape.storages[s] for s in sorted({*op.writes, *(v.storage for v in values)})]
    contents = [None if s.data is None else hashlib.blake2b(s.data.numpy().tobytes()).hexdigest() for s in storages]
    described = [(s.nbytes, s.role, s.name, s.device) for s in storages]
    return repr((values, op.outputs, op.writes, op.phase, described, contents))


def _shape(value: Value) -> str:
    return f"{value.dtype} {[*value.shape]}"


def _same_contents(a: RecordedStorage, b: RecordedStorage) -> bool:
    if a.data is None or b.data is None:
        return a.data is b.data
    return torch.equal(a.data, b.data)


@contextmanager
def other_generators_untouched(what: str = "the step", code: StateOfCode | None = None) -> Iterator[None]:
    """Raise CaptureError, naming `what`, if the block draws from Python's or numpy's global generator; restore both.

    `code`: the observer of the program in the block, which knows the function that drew.
    """
    python, arrays = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
        drawn = [
            name
            for name, before, now in (
                ("Python's `random`", python, random.getstate()),
                ("`numpy.random`", arrays, np.random.get_state(legacy=False)),
            )
            if pickle.dumps(before) != pickle.dumps(now)
        ]
        if drawn:
            place = f" (in {code.drew_in})" if code is not None and code.drew_in else ""
            raise CaptureError(f"{what} draws random numbers from {' and '.join(drawn)}{place}: {_REMEDY}")
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
