"""Results that a step computes twice, as in gradient checkpointing. They are recorded once, because the
plan decides what is kept.

A storage that the backward pass fills with the same operators on the same contents as an earlier one contains the same
bits. The same is true of random numbers if the generator was restored to its earlier state.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from port_planner.base.errors import CaptureError
from port_planner.capture.recorder import RecordedOp, Tape
from port_planner.ir.graph import Argument, Phase, Ref, Role, references


def merge_recomputed(tape: Tape, kept: set[int]) -> None:
    """Remove operators of the backward pass that only repeat earlier ones; storages in `kept` stay.

    Raises CaptureError if the step's random numbers are not one continuous sequence: a bundle's worker draws them in
    the order of its operators.
    """
    lives = _lives(tape)
    twins = _twins(tape, lives, kept)
    repeated = _settled(tape, lives, twins)
    tape.ops[:] = [op for i, op in enumerate(tape.ops) if i not in repeated]
    for again, first in twins.items():
        lay_into(tape, again, first)
    require_one_stream(tape.ops, tape.draws_from)


def lay_into(tape: Tape, gone: int, into: int) -> None:
    """Move every value of storage `gone` to storage `into`."""
    for v, value in enumerate(tape.values):
        if value.storage == gone:
            tape.values[v] = replace(value, storage=into)
    for op in tape.ops:
        if gone in op.writes:
            op.writes = tuple(sorted({into if s == gone else s for s in op.writes}))


@dataclass(slots=True)
class _Life:
    """The history of one storage: its successive contents, and which operators create and read each of them."""

    contents: list[Hashable] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)
    """Operators that create or change the storage."""
    readers: list[tuple[int, int]] = field(default_factory=list)
    """Operators that read the storage, each with the number of contents that there had been by then."""


def _lives(tape: Tape) -> dict[int, _Life]:
    lives: dict[int, _Life] = defaultdict(_Life)
    numbers: dict[Hashable, int] = {}

    def content(storage: int) -> Hashable:
        made = lives[storage].contents
        return made[-1] if made else ("before", storage)

    def spelled(argument: Argument) -> Hashable:
        if isinstance(argument, Ref):
            value = tape.values[argument.value]
            return replace(value, storage=0), content(value.storage)
        if isinstance(argument, tuple):
            return tuple(spelled(a) for a in argument)
        return type(argument).__name__, repr(argument)

    for i, op in enumerate(tape.ops):
        key = op.name, spelled(op.args), tuple((k, spelled(a)) for k, a in op.kwargs), op.draws_from
        number = numbers.setdefault(key, len(numbers))
        for storage in _read(tape, op):
            lives[storage].readers.append((i, len(lives[storage].contents)))
        for place, storage in enumerate(_made(tape, op)):
            lives[storage].contents.append((number, place))
            lives[storage].makers.append(i)
    return lives


def _read(tape: Tape, op: RecordedOp) -> Iterator[int]:
    arguments = (*op.args, *(a for _, a in op.kwargs))
    return iter(dict.fromkeys(tape.values[v].storage for a in arguments for v in references(a)))


def _made(tape: Tape, op: RecordedOp) -> tuple[int, ...]:
    """Return the storages that an operator writes to, then those it creates."""
    made = (tape.values[v].storage for v in op.outputs if v is not None)
    return tuple(dict.fromkeys((*op.writes, *made)))


def _twins(tape: Tape, lives: Mapping[int, _Life], kept: set[int]) -> dict[int, int]:
    """Map storages that the backward pass fills exactly as the forward pass filled another to that other one."""
    forward: dict[Hashable, int] = {}
    twins = {}
    for storage, life in sorted(lives.items()):
        entry = tape.storages[storage]
        if entry.role is not Role.TEMPORARY or not life.contents or storage in kept:
            continue
        history = tuple(life.contents), entry.nbytes
        if tape.ops[life.makers[0]].phase is Phase.FORWARD:
            forward.setdefault(history, storage)
        elif history in forward:
            twins[storage] = forward[history]
    return twins


def _settled(tape: Tape, lives: Mapping[int, _Life], twins: dict[int, int]) -> set[int]:
    """Return the operators that only fill twins; discard twins whose operators must remain.

    These are twins that an operator fills together with a storage that has no twin, and twins that a remaining operator
    reads before they are complete.
    """
    while True:
        repeated = {i for i, op in enumerate(tape.ops) if (made := _made(tape, op)) and all(s in twins for s in made)}
        struck = [
            s
            for s in twins
            if any(i not in repeated for i in lives[s].makers)
            or any(i not in repeated for i, seen in lives[s].readers if seen < len(lives[s].contents))
        ]
        if not struck:
            return repeated
        for storage in struck:
            del twins[storage]


def require_one_stream(ops: Iterable[RecordedOp], state: bytes) -> bytes:
    """Return the generator's state after operators that draw from this state onwards.

    Raises CaptureError if it is set in between.
    """
    for op in ops:
        if op.random:
            if op.draws_from != state:
                place = f"{op.line}: " if op.line else ""
                raise CaptureError(
                    f"{place}the step sets torch's random generator before {op.name}; a bundle draws every step's "
                    "numbers in one sequence. Take the seeding out of the step, or train with `port-agent exec`"
                )
            state = op.draws_to
    return state
