"""A plan's decisions in their places around the ops, made by `lower` and turned into instructions by `emit`.

`lower` makes it, and `emit` turns it into instructions.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from port_planner.ir.costs import CostTable, PackingCost
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.update_slices import slice_bounds
from port_planner.ir.plan import Decision
from port_planner.ir.program import UpdateGroup


@dataclass(slots=True)
class Position:
    """The actions around one op, filled from the plan and emitted in order."""

    returns: list[int] = field(default_factory=list)
    rematerializations: list[Decision] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    targets: dict[int, int] = field(default_factory=dict)
    """Targets of the storages in `writes`; 0 if not listed."""
    packs: list[PackingCost] = field(default_factory=list)
    unpacks: list[PackingCost] = field(default_factory=list)
    stays_packed: set[int] = field(default_factory=set)
    """Storages in `packs` that are read in packed form from here on, and never unpacked."""
    packed_targets: dict[int, int] = field(default_factory=dict)
    """Targets to which packed forms of storages in `packs` are paged; those not listed stay in RAM."""


@dataclass(frozen=True, slots=True)
class HostPages:
    """Pages in the host's memory: (storage, byte) by storage, and the bytes of the block that holds them all.

    `copies`: persistent storages, which have copies of their own alongside the block.
    """

    places: tuple[tuple[int, int], ...] = ()
    nbytes: int = 0
    copies: frozenset[int] = frozenset()


@dataclass(slots=True)
class Due:
    """A read: `storage` must be resident before op `use`.

    It can be asked for from op `earliest` on.

    `moment`: seconds, if nothing ever waited, by which it must be done. `packed`: costs of the storage's
    packed form, if it is packed.
    """

    use: int
    storage: int
    earliest: int
    moment: float
    packed: PackingCost | None = None


@dataclass(frozen=True, slots=True)
class SlicedUpdates:
    """The update groups that a plan streams in slices.

    `counts`: group -> number of slices; keys below are groups.
    """

    groups: Sequence[UpdateGroup]
    counts: Mapping[int, int]
    size: Sequence[int]
    group_at: dict[int, int] = field(default_factory=dict)
    """Op -> the sliced group to which it belongs."""
    changed: dict[int, set[int]] = field(default_factory=dict)
    """Storages that it changes."""
    touched: dict[int, set[int]] = field(default_factory=dict)
    """Storages that it reads, creates or changes."""
    streamed: dict[int, set[int]] = field(default_factory=dict)
    """Storages that pass through it slice by slice and are never resident as a whole."""
    written: dict[int, set[int]] = field(default_factory=dict)
    """Storages that are resident whole before it and on flash after it."""

    def starts(self, op: int) -> int | None:
        """Return the sliced group whose first op `op` is."""
        g = self.group_at.get(op)
        return g if g is not None and op == self.groups[g].first else None

    def ends(self, op: int) -> int | None:
        """Return the sliced group whose last op `op` is."""
        g = self.group_at.get(op)
        return g if g is not None and op == self.groups[g].last else None

    def resident_bytes(self, g: int) -> int:
        """Return the bytes that a sliced group holds in addition to whole storages.

        These are two buffers for each streamed storage, and one for each temporary.
        """
        group = self.groups[g]
        size = max(stop - start for start, stop in slice_bounds(group.nbytes, self.counts[g]))
        streamed = len(self.streamed[g] - set(group.temporaries))
        return size * (2 * streamed + len(group.temporaries))


@dataclass(frozen=True, slots=True)
class Placement:
    """A plan in its places. Sequences are indexed by op.

    Byte figures are resident bytes besides the process's own.
    """

    graph: StepGraph
    costs: CostTable
    limit: int | None
    """Resident bytes that must not be exceeded; None: no limit."""
    size: Sequence[int]
    """Bytes of each storage."""
    updates: SlicedUpdates
    at: Sequence[Position]
    homes: Mapping[int, int]
    """Persistent storage that is paged -> the target that all its pages go to."""
    starts_away: Set[int]
    """Storages that are on their target at the start of the step."""
    reruns: Mapping[int, Sequence[tuple[int, tuple[int, ...]]]]
    """Op -> what runs again before it: (op, storages to free afterwards)."""
    reads: Sequence[Due]
    """Reads in order of use."""
    need: npt.NDArray[np.int64]
    """Bytes at the fullest moment of each op's position, if writes took no time and reads completed on demand."""
    after_need: npt.NDArray[np.int64]
    host: HostPages
    starts: npt.NDArray[np.float64]
    """Seconds at which each op starts if nothing ever waits, followed by the end."""
