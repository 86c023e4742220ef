"""The static memory plan: one offset per buffer, lifetimes taken over forward and backward together.

`plan_arena` is best fit over several orders, then a small exact search of the placement order; it stops as soon as
the peak equals the lower bound, the largest sum of sizes alive in one step. No plan leaves unverified
(`verify_plan`, brute force).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from port_planner.base.errors import PortError

ALIGNMENT = 4
SEARCH_ROUNDS = 400


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer alive in the steps [first, last], both included, and in those of `again`,
    when it is at the same place.
    """

    name: str
    size_bytes: int
    first: int
    last: int
    again: tuple[int, int] | None = None

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The steps in which it is alive."""
        return ((self.first, self.last),) if self.again is None else ((self.first, self.last), self.again)

    def meets(self, other: Buffer) -> bool:
        """Return whether both are alive in some step."""
        if self.again is None and other.again is None:
            return self.first <= other.last and other.first <= self.last
        return any(a[0] <= b[1] and b[0] <= a[1] for a in self.spans for b in other.spans)


@dataclass(frozen=True, slots=True)
class Arena:
    """Offsets of all buffers, the arena's size, and a lower bound that no plan can beat."""

    buffers: tuple[Buffer, ...]
    offsets: dict[str, int]
    peak_bytes: int
    lower_bound_bytes: int


class OverlapError(PortError):
    """Raised when two live buffers share bytes, which is a defect of the planner."""

    def __init__(self, first: Buffer, second: Buffer) -> None:
        super().__init__(
            f"{first.name} and {second.name} overlap while both are alive; report this, the planner is wrong"
        )
        self.first = first
        self.second = second


def aligned(size_bytes: int) -> int:
    """Return the size rounded up to the arena's alignment."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def lower_bound(buffers: Iterable[Buffer]) -> int:
    """Return the largest sum of sizes alive in one step."""
    changes: dict[int, int] = {}
    for buffer in buffers:
        for first, last in buffer.spans:
            changes[first] = changes.get(first, 0) + aligned(buffer.size_bytes)
            changes[last + 1] = changes.get(last + 1, 0) - aligned(buffer.size_bytes)
    alive = most = 0
    for step in sorted(changes):
        alive += changes[step]
        most = max(most, alive)
    return most


def plan_arena(buffers: Sequence[Buffer], rounds: int = SEARCH_ROUNDS) -> Arena:
    """Return offsets whose peak is as near the lower bound as the search found.

    The same input gives the same plan.
    """
    bound = lower_bound(buffers)
    conflicts = _conflicts(buffers)
    best_order, best = _best_start(buffers, conflicts)
    if best.peak > bound:
        best = _search(buffers, conflicts, best_order, best, bound, rounds)
    arena = Arena(tuple(buffers), {b.name: o for b, o in zip(buffers, best.offsets, strict=True)}, best.peak, bound)
    verify_plan(arena)
    return arena


@dataclass(frozen=True, slots=True)
class _Placement:
    offsets: list[int]
    peak: int


def _conflicts(buffers: Sequence[Buffer]) -> list[list[int]]:
    return [
        [j for j, other in enumerate(buffers) if j != i and buffer.meets(other)] for i, buffer in enumerate(buffers)
    ]


_ORDERS: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
    lambda b: (-b.size_bytes, b.first),
    lambda b: (-(b.last - b.first), -b.size_bytes),
    lambda b: (-b.size_bytes * (b.last - b.first + 1),),
    lambda b: (b.first, -b.size_bytes),
    lambda b: (-b.last, -b.size_bytes),
)


def _best_start(buffers: Sequence[Buffer], conflicts: list[list[int]]) -> tuple[list[int], _Placement]:
    orders = [_sorted(buffers, key) for key in _ORDERS]
    placed = [(_place(buffers, conflicts, order), order) for order in orders]
    placement, order = min(placed, key=lambda pair: pair[0].peak)
    return order, placement


def _sorted(buffers: Sequence[Buffer], key: Callable[[Buffer], tuple[int, ...]]) -> list[int]:
    return sorted(range(len(buffers)), key=lambda index: (key(buffers[index]), index))


def _place(buffers: Sequence[Buffer], conflicts: list[list[int]], order: Sequence[int]) -> _Placement:
    """Place the buffers one after the other, each into the tightest gap between those alive with it."""
    offsets = [-1] * len(buffers)
    peak = 0
    for index in order:
        size = aligned(buffers[index].size_bytes)
        taken = sorted(
            (offsets[j], offsets[j] + aligned(buffers[j].size_bytes)) for j in conflicts[index] if offsets[j] >= 0
        )
        offsets[index] = _tightest_gap(taken, size)
        peak = max(peak, offsets[index] + size)
    return _Placement(offsets, peak)


def _tightest_gap(taken: list[tuple[int, int]], size: int) -> int:
    best, best_waste, end = -1, -1, 0
    for start, stop in taken:
        waste = start - end - size
        if waste >= 0 and (best < 0 or waste < best_waste):
            best, best_waste = end, waste
        end = max(end, stop)
    return best if best >= 0 else end


def _search(
    buffers: Sequence[Buffer], conflicts: list[list[int]], order: list[int], best: _Placement, bound: int, rounds: int
) -> _Placement:
    """Move buffers that reach the peak, and some others, to the front of the order.

    Keep what does not hurt.
    """
    choose = random.Random(len(buffers))
    current, placed = list(order), _place(buffers, conflicts, order)
    for _ in range(rounds):
        candidate = _perturbed(buffers, placed, current, choose)
        placement = _place(buffers, conflicts, candidate)
        if placement.peak <= placed.peak:
            current, placed = candidate, placement
        if placement.peak < best.peak:
            best = placement
        if best.peak == bound:
            break
    return best


def _perturbed(buffers: Sequence[Buffer], placed: _Placement, order: list[int], choose: random.Random) -> list[int]:
    tops = [i for i in order if placed.offsets[i] + aligned(buffers[i].size_bytes) == placed.peak]
    moved = choose.choice(tops) if choose.random() < 0.6 else choose.choice(order)
    result = [i for i in order if i != moved]
    result.insert(choose.randrange(order.index(moved) + 1), moved)
    return result


def verify_plan(arena: Arena) -> None:
    """Raise OverlapError if two buffers alive in one step share a byte, by comparing every pair."""
    for i, first in enumerate(arena.buffers):
        start, stop = arena.offsets[first.name], arena.offsets[first.name] + first.size_bytes
        for second in arena.buffers[i + 1 :]:
            other = arena.offsets[second.name]
            if first.meets(second) and start < other + second.size_bytes and other < stop:
                raise OverlapError(first, second)
        if start % ALIGNMENT or stop > arena.peak_bytes:
            raise OverlapError(first, first)
