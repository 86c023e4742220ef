"""The numbers among the arguments of a step's operators that change from batch to batch."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

from port_planner.base.errors import CaptureError
from port_planner.capture.recorder import RecordedOp, Tape
from port_planner.capture.rerecord_check import spelled_call, spelled_tensors
from port_planner.ir.allowed_operators import OperatorError
from port_planner.ir.graph import Argument, Scalar, references
from port_planner.ir.known_steps import KnownShape
from port_planner.ir.torch_operators import resolve

_NUMBERS = frozenset({"number", "float", "Tensor"})
"""Types of parameters, in torch's schemas, that affect only an operator's numbers."""
_MAX_WHOLE = 1 << 53
"""Largest whole number up to which a float can represent all."""
_REAL = frozenset({"float16", "bfloat16", "float32", "float64"})

Place = tuple[int, int | str]
"""An operator on a tape, and the position or keyword of an argument."""


def numbers_of(tape: Tape) -> dict[Place, float]:
    """Return the numbers of a tape, by operator and argument, that may change without changing anything else.

    A whole number counts only alongside tensors of floating point: there it computes what the same float does.
    """
    found: dict[Place, float] = {}
    for i, op in enumerate(tape.ops):
        arguments: list[tuple[int | str, Argument]] = [*enumerate(op.args), *op.kwargs]
        plain = {k: a for k, a in arguments if isinstance(a, int | float) and not isinstance(a, bool)}
        if not plain:
            continue
        kinds = {tape.values[v].dtype for _, a in arguments for v in references(a)}
        types = dict(_types(op))
        for place, number in plain.items():
            as_float = isinstance(number, float) or (kinds and kinds <= _REAL and abs(number) <= _MAX_WHOLE)
            if types.get(place) in _NUMBERS and as_float:
                found[i, place] = float(number)
    return found


def _types(op: RecordedOp) -> Iterator[tuple[int | str, str]]:
    try:
        function: Any = resolve(op.name)
    except OperatorError:
        return
    for place, parameter in enumerate(function._schema.arguments):
        yield place, str(parameter.type)
        yield parameter.name, str(parameter.type)


def without_numbers(tape: Tape) -> Tape:
    """Return a tape whose numbers that may change are all alike."""
    places = numbers_of(tape)

    def masked(op: RecordedOp, i: int) -> RecordedOp:
        args = tuple("a number" if (i, k) in places else a for k, a in enumerate(op.args))
        return replace(op, args=args, kwargs=tuple((k, "a number" if (i, k) in places else a) for k, a in op.kwargs))

    return replace(tape, ops=[masked(op, i) for i, op in enumerate(tape.ops)])


def digest_of_calls(tape: Tape, places: Set[Place]) -> str:
    """Return a digest of the operators and their arguments, without tensors and the numbers at `places`."""
    without: dict[int, set[int | str]] = defaultdict(set)
    for i, place in places:
        without[i].add(place)
    found = hashlib.blake2b(digest_size=16)
    for i, op in enumerate(tape.ops):
        found.update(spelled_call(op, without.get(i, frozenset())).encode())
    return found.hexdigest()


def digest(tape: Tape, places: Set[Place]) -> str:
    """Return a digest of everything that makes steps the same, without the numbers at `places`."""
    found = hashlib.blake2b(digest_of_calls(tape, places).encode(), digest_size=16)
    for op in tape.ops:
        found.update(spelled_tensors(tape, op).encode())
    return found.hexdigest()


def put_slots(tape: Tape, known: KnownShape) -> int:
    """Replace the numbers that change in the known steps by slots, and return how many there are.

    Raises CaptureError if the tape's calls differ from those steps'.
    """
    if digest_of_calls(tape, {(place.op, place.argument) for place in known.places}) != known.digest:
        raise CaptureError(
            "the step calls other operators than the script alone, whose steps were followed because it counts or keeps "
            "tensors over steps; train with `port-agent exec`, which supports this"
        )
    by_op: dict[int, dict[int | str, Scalar]] = defaultdict(dict)
    for place in known.places:
        by_op[place.op][place.argument] = Scalar(place.slot)
    for i, slots in by_op.items():
        op = tape.ops[i]
        args = tuple(slots.get(k, a) for k, a in enumerate(op.args))
        tape.ops[i] = replace(op, args=args, kwargs=tuple((k, slots.get(k, a)) for k, a in op.kwargs))
    return len({place.slot for place in known.places})
