"""The linear sequence of instructions that an executor follows, with its figures.

The figures are memory, time and energy.
"""

import enum
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from port_planner.base.direct_io import padded
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.costs import PackingCost
from port_planner.ir.graph import StepGraph


class PlanError(PortError):
    """The plan does not fit its graph: a read of a freed tensor, an op that cannot be run again, ..."""

    exit_code = ExitCode.IMPOSSIBLE


class BudgetError(PlanError):
    """The step needs more memory than its budget at one op.

    Attributes: `op` (index), `needed_bytes`, `limit_bytes`, `holders`: (storage, bytes) that are resident there.
    """

    def __init__(self, op: int, name: str, needed: int, limit: int, holders: tuple[tuple[int, int], ...]) -> None:
        self.op, self.needed_bytes, self.limit_bytes, self.holders = op, needed, limit, holders
        super().__init__(
            f"the step needs {needed / 2**20:.1f} MiB at op {op} ({name}), but the budget is {limit / 2**20:.1f} MiB; "
            f"raise the budget to at least {needed / 2**20:.1f} MiB or use a smaller batch"
        )


class CostlyPlanError(PlanError):
    """The plan costs more than allowed."""


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """The ops `first`..`last` (all consecutive) that update storage `parameter`.

    `storages`: the storages of `parameter`'s size that they touch (parameter, gradients, optimizer state, temporaries);
    `temporaries`: storages that are created and dead inside. `whole`: ops on single elements, run once, before.
    """

    parameter: int
    first: int
    last: int
    storages: tuple[int, ...]
    temporaries: tuple[int, ...]
    whole: tuple[int, ...]
    nbytes: int


class Code(enum.IntEnum):
    """The kind of an instruction."""

    RUN = 0
    RERUN = 1
    FREE = 2
    WRITE = 3
    WAIT_WRITE = 4
    READ = 5
    WAIT_READ = 6
    SLICED = 7
    WAIT_SLICED = 8
    PACK = 9
    UNPACK = 10
    WRITE_PACKED = 11
    WAIT_WRITE_PACKED = 12
    READ_PACKED = 13
    WAIT_READ_PACKED = 14


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    `index` is an op for RUN and RERUN, an update group for SLICED and WAIT_SLICED, an entry of `Program.packings` for
    PACK, UNPACK and what moves packed forms, else a storage.

    SLICED starts a group's update, which runs alongside the following instructions until WAIT_SLICED.

    `resident_bytes`: bytes that are resident while it runs, including landing buffers and unfinished writes, but
    not the worker's own base. `target`: the paging target of a WRITE or WRITE_PACKED; a READ goes where the last
    WRITE of its storage went.
    """

    code: Code
    index: int
    resident_bytes: int = 0
    target: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of one step and their figures from the lowering.

    `starts_on_flash`: persistent storages that are on flash, not in RAM, when the step starts and ends;
    `starts_on_host`: those that are only in the host's memory then, if the device has its own. `replayed`: random ops
    whose generator state must be kept because they run again. `slice_written`: update group -> storages that are fully
    resident when it starts and paged out when it ends, written slice by slice. `cross_step`: persistent storages whose
    write may still be in progress when the step ends; the next one waits for it. `seconds`, `stall_seconds`: for a step
    in a sequence of equal steps, with the previous step's writes still in progress. `packings`: the packed storages,
    one entry per gap in the order of packing; `packing_seconds`: of both directions. `written_to`: bytes by paging
    target. `wear_joules`: the wear of the media by the written bytes, as the energy of the same price (`Flash`).
    """

    graph: StepGraph
    instructions: tuple[Instruction, ...]
    groups: tuple[UpdateGroup, ...]
    slice_counts: tuple[tuple[int, int], ...]
    slice_written: tuple[tuple[int, tuple[int, ...]], ...]
    starts_on_flash: frozenset[int]
    cross_step: frozenset[int]
    replayed: frozenset[int]
    peak_bytes: int
    peak_op: int
    seconds: float
    compute_seconds: float
    stall_seconds: float
    joules: float
    recompute_seconds: float
    read_bytes: int
    written_to: tuple[int, ...]
    wear_joules: float
    packings: tuple[PackingCost, ...] = ()
    packing_seconds: float = 0.0

    timeline: tuple[int, ...] = field(repr=False, default=())
    """Resident bytes (base included) during each op."""
    memory_targets: frozenset[int] = frozenset()
    """Paging targets in the host's memory, if the device has its own."""
    host_places: tuple[tuple[int, int], ...] = ()
    """Storage -> offset of its page in the host's block of pages."""
    host_block_bytes: int = 0
    """Bytes of that block."""
    starts_on_host: frozenset[int] = frozenset()
    host_copies: frozenset[int] = frozenset()
    """Persistent storages that are paged to the host's memory, where each has its own copy in all steps."""
    beside_bytes: int = 0
    """The peak host memory of a device's step besides pages: storages and operator workspace on the host."""

    @property
    def starts_away(self) -> frozenset[int]:
        """Persistent storages that are not where operators compute when the step starts and ends."""
        return self.starts_on_flash | self.starts_on_host

    @property
    def host_bytes(self) -> int:
        """The host memory of pages and copies, if the device has its own."""
        return self.host_block_bytes + sum(padded(self.graph.storages[s].nbytes) for s in self.host_copies)

    @property
    def written_bytes(self) -> int:
        """Bytes that a step writes to media in total."""
        return sum(nbytes for d, nbytes in enumerate(self.written_to) if d not in self.memory_targets)

    @property
    def cost_joules(self) -> float:
        """The joules by which plans are compared: energy and wear."""
        return self.joules + self.wear_joules


def host_bytes_of(programs: Iterable[Program]) -> int:
    """Return the host memory of programs that alternate, if the device has its own.

    The block of pages never shrinks; copies that a program does not use are freed.
    """
    made = tuple(programs)
    return max(p.host_block_bytes for p in made) + max(p.host_bytes - p.host_block_bytes + p.beside_bytes for p in made)


def idle_gaps(graph: StepGraph, storage: int) -> Iterable[tuple[int, int]]:
    """Yield the (after, before) gaps of a storage between uses that are not neighbours, in graph order."""
    uses = graph.uses[storage]
    for a, b in itertools.pairwise(uses):
        if b > a + 1:
            yield a, b
