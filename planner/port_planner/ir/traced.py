"""A traced step, the target for which to plan it, and the plan.

These are exchanged between a program and the process that plans for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from port_planner.ir.costs import DeviceCosts

PLANNING_MODULE = "port_planner.search.traced_plan"
"""Module that the planning process runs."""

GREEDY_BYTES = 56 << 20
SEARCH_BYTES = 144 << 20
"""Resident bytes of the planning process, measured on a step of 3,600 operators (46 and 129 MB), plus a tenth."""


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One operator: seconds, bytes of workspace, and storages by index, each at most once.

    `reads`: its operands, including those that it changes. `writes`: storages that it changes or creates.
    `makes`: storages whose life begins here. `repeatable`: whether it gives the same bits again on the same
    operands, and changes nothing.
    """

    seconds: float
    workspace_bytes: int
    reads: tuple[int, ...]
    writes: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    repeatable: bool = False


@dataclass(frozen=True, slots=True)
class TracedStorage:
    """A block of memory. `persistent`: it exists before and after the step.

    `ends`: the operator before which the program frees it; the number of operators if it is not freed in this step.
    """

    nbytes: int
    persistent: bool
    ends: int


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step of a program that repeats it."""

    ops: tuple[TracedOp, ...]
    storages: tuple[TracedStorage, ...]


@dataclass(frozen=True, slots=True, order=True)
class Departure:
    """A storage is evicted after operator `after` used it, to be paged or recomputed."""

    after: int
    storage: int
    recomputed: bool


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A planning request: a step, the device's rates, and the bytes of tensors that may be resident.

    Rates are amounts per second and per joule.

    `search_s`: CPU seconds for the search, 0 for the greedy plan alone.
    """

    step: TracedStep
    device: DeviceCosts
    tensor_bytes: int
    search_s: float
    deadline_s: float | None = None
    write_limit_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class TracedPlan:
    """The evictions and the positions of a plan, and the cost of a step when replayed."""

    departures: tuple[Departure, ...]
    strategy: str
    seconds: float
    moved_seconds: float
    """Seconds of paging and recomputation, including those hidden behind operators."""
    joules: float
    """Joules, without the wear of written bytes."""
    peak_bytes: int
    written_bytes: int


_LENGTH_BYTES = 4


def pack_traced_plan(plan: TracedPlan) -> bytes:
    """Return a plan in the form that the planning process writes: its length, big-endian, and msgpack."""
    packed = msgspec.msgpack.encode(plan)
    return len(packed).to_bytes(_LENGTH_BYTES) + packed


def read_traced_plans(written: bytes) -> Iterator[TracedPlan]:
    """Yield the plans written so far; an incomplete one is omitted."""
    place = 0
    while place + _LENGTH_BYTES <= len(written):
        start = place + _LENGTH_BYTES
        place = start + int.from_bytes(written[place:start])
        if place <= len(written):
            yield msgspec.msgpack.decode(written[start:place], type=TracedPlan)
