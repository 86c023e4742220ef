"""Plans stored for the next run of the same program, as files in the user's cache, one for each step.

A plan is advice, so another program's file costs only time; a damaged file is ignored.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from port_agent.intercept.residency.trace import SegmentPlan
from port_planner.base.cache import cache_folder, read_cached, write_cached
from port_planner.ir.traced import TracedPlan

_FOLDER = "plans"
_PLANS_KEPT = 128
"""Largest number of files kept, of about 20 KB each; the oldest are removed."""

_FORMAT = 3

_OTHER_MEDIUM = 4.0
"""Ratio of speeds of the medium beyond which a plan is made again; a busy medium varies by less."""


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """A plan of a step, by segment: where operands are evicted or dropped, and which results are recomputed."""

    strategy: str
    predicted_s: float
    leaving: list[tuple[int, int, int, bool]]
    """Evictions: segment, position, operand, and whether it is recomputed."""
    remade: list[tuple[int, int]]
    """Recomputed results: segment and position."""
    bytes_per_s: tuple[float, float]
    """Read and write speed of the medium for which it was made."""

    @classmethod
    def of(cls, plan: TracedPlan, segments: Iterable[SegmentPlan], bytes_per_s: tuple[float, float]) -> "KeptPlan":
        """Return a plan with its parts for the segments."""
        leaving, remade = [], []
        for k, segment in enumerate(segments):
            leaving += [(k, p, o, again) for p, operands in segment.leaving.items() for o, again in operands.items()]
            remade += [(k, p) for p in segment.remade]
        return cls(plan.strategy, plan.seconds, leaving, remade, bytes_per_s)

    def suits(self, bytes_per_s: tuple[float, float]) -> bool:
        """Return whether a medium is about as fast as the one for which the plan was made."""
        pairs = zip(self.bytes_per_s, bytes_per_s, strict=True)
        return all(made_for < _OTHER_MEDIUM * now and now < _OTHER_MEDIUM * made_for for made_for, now in pairs)

    def segment_plans(self, count: int) -> list[SegmentPlan]:
        """Return the plan of each of `count` segments."""
        plans = [SegmentPlan() for _ in range(count)]
        for segment, position, operand, recomputed in self.leaving:
            if 0 <= segment < count:
                plans[segment].leaving.setdefault(position, {})[operand] = recomputed
        for segment, position in self.remade:
            if 0 <= segment < count:
                plans[segment].remade.add(position)
        return plans


def plan_name(
    segments: Sequence[int],
    budget_bytes: int,
    deadline_s: float | None,
    written_bytes: int | None,
    wear_joules_per_byte: float,
    *,
    whole_process: bool,
) -> str:
    """Return the name of a plan, made from the hashes of its step's segments, the budget, the limits and
    the wear of a written byte.
    """
    fields = msgspec.msgpack.encode(
        [_FORMAT, list(segments), budget_bytes, deadline_s, written_bytes, wear_joules_per_byte, whole_process]
    )
    return hashlib.sha256(fields).hexdigest()[:32]


def read_plan(name: str) -> KeptPlan | None:
    """Return the plan that is stored under a name; None if there is none, or it cannot be read."""
    return read_cached(cache_folder(_FOLDER), name, KeptPlan)


def keep_plan(name: str, plan: KeptPlan) -> None:
    """Store a plan atomically; if the cache cannot be written, it is not stored."""
    write_cached(cache_folder(_FOLDER), name, plan, max_files=_PLANS_KEPT)


def forget_plan(name: str) -> None:
    """Remove a stored plan."""
    folder = cache_folder(_FOLDER)
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
