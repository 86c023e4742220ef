"""The abstract planning problem: stages in a fixed order, tensors with idle gaps, budgets.

A *stage* runs one operator (or a short run of them). A *tensor* is touched at its accesses; between two
accesses it is idle, and each idle *gap* may be bridged by keeping it, paging it, rematerializing it or packing
it. The gaps of persistent tensors (weights, optimizer state) wrap around the end of the step. Nothing here
knows torch, graphs or solvers.
"""

import enum
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from port_planner.base.errors import ExitCode, PortError


class ProblemError(PortError):
    """A planning problem contradicts itself."""

    exit_code = ExitCode.IMPOSSIBLE


class Semantics(enum.Enum):
    """The physical rules by which a plan is judged."""

    POET = "poet"
    """Transfers take no time and need no buffer; no static power (POET, ICML 2022)."""
    REAL = "real"
    """Transfers overlap with compute or stall it, need landing buffers, and the device draws static watts."""
    ELASTIC = "elastic"
    """Like REAL, but a transfer without space for its buffer waits instead of exceeding the budget.

    `port_planner.ir.lowering.lower` treats captured steps this way.
    """


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the fixed order. `fixed_bytes` are held at this stage regardless of the plan.

    `overcount_bytes`: by how much fixed bytes, workspace and accesses together may overstate the stage's need, if it
    stands for several operators. A schedule gives up that memory; a bound must not.
    """

    name: str
    seconds: float
    joules: float
    workspace_bytes: int = 0
    fixed_bytes: int = 0
    overcount_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Paging:
    """Cost of one tensor's round trip to one paging target (flash, zram)."""

    target: int
    seconds_out: float
    seconds_in: float
    joules_out: float
    joules_in: float
    stored_bytes: int = 0
    """Bytes that stay in RAM while the tensor is paged out (zram); 0 for flash."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Lossless packing through a gap: bytes while packed, and seconds and joules of both directions together.

    The packed form and the tensor coexist at both ends of the gap: after the stage before it, and before the stage
    after it. `paging`: round trips of the packed form to media, for a gap in which it is there.
    """

    packed_bytes: int
    seconds: float
    joules: float
    paging: tuple[Paging, ...] = ()

    def paging_to(self, target: int) -> Paging | None:
        """Return the cost of the packed form's round trip to a target; None if it cannot go there."""
        return next((p for p in self.paging if p.target == target), None)


@dataclass(frozen=True, slots=True)
class Rematerialization:
    """How to compute one version of a tensor again: the cost, and the (tensor, version) pairs that it reads.

    `own_share`: its operators may also rematerialize other tensors; this is the part of the cost that is
    left if each of them pays an equal part. A bound may count only this; a schedule that rematerializes
    only this tensor pays everything.
    """

    seconds: float
    joules: float
    inputs: tuple[tuple[int, int], ...]
    workspace_bytes: int = 0
    own_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Tensor:
    """A block of memory with its accesses.

    `accesses` are the stages that create, read or write it, ascending; `writes` are those that change its contents, its
    creation included. `rematerializations[v]` restores the contents after the v-th write, `packings[v]` packs them;
    None where that is impossible.
    """

    name: str
    nbytes: int
    accesses: tuple[int, ...]
    writes: tuple[int, ...]
    persistent: bool = False
    rematerializations: tuple[Rematerialization | None, ...] = ()
    paging: tuple[Paging, ...] = ()
    packings: tuple[Packing | None, ...] = ()
    pinned: bool = False
    """Whether the tensor is always kept between its accesses; after the last one it may return as an intermediate."""

    def rematerialization(self, version: int) -> Rematerialization | None:
        """Return how to compute a version again; None if that is impossible."""
        return self.rematerializations[version] if 0 <= version < len(self.rematerializations) else None

    def packing(self, version: int) -> Packing | None:
        """Return the cost of packing a version; None if that is impossible."""
        return self.packings[version] if 0 <= version < len(self.packings) else None

    def version_after(self, stage: int) -> int:
        """Return how many writes have happened once `stage` has run, minus one; -1 means
        contents from before the step.
        """
        return sum(w <= stage for w in self.writes) - 1

    def version_before(self, stage: int) -> int:
        """Return the version at the start of `stage`."""
        return sum(w < stage for w in self.writes) - 1

    def contents(self, version: int) -> int:
        """Return the contents of a version; a persistent tensor starts a step with those of the last write."""
        return version % len(self.writes) if self.persistent and self.writes else version

    @property
    def birth(self) -> int:
        """The first stage at which the tensor exists; -1 if it exists before the step."""
        return -1 if self.persistent else self.accesses[0]


@dataclass(frozen=True, slots=True)
class Gap:
    """Stages `after` < s < `before` in which `tensor` is idle.

    A gap of a persistent tensor that wraps around the step's end has `before` >= number of stages. `dead` gaps follow
    the last access of a temporary tensor: only rematerializations of other tensors may still need it.
    """

    tensor: int
    after: int
    before: int
    version: int
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Slicing:
    """An update that may run slice by slice, if the persistent `members` are paged in before it and out after it.

    Neither the members nor `saved_bytes` of the stage's workspace are then resident, only `buffer_bytes`. `other_bytes`
    (the gradient) may also pass in slices if it is paged there; only a bound relies on that.
    """

    stage: int
    members: tuple[int, ...]
    saved_bytes: int
    buffer_bytes: int
    other_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageChange:
    """What an alternative takes in addition (negative: less) at one stage, compared with the first of its group."""

    stage: int
    seconds: float = 0.0
    joules: float = 0.0
    workspace_bytes: int = 0
    fixed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TileSaving:
    """`nbytes` of a tensor that an alternative does not need at some of its accesses, `stages`, where the
    tensor exists tile by tile.

    It applies only if none of the tensor's `gaps` keeps it whole: each pages or rematerializes it until the gap's end.
    """

    tensor: int
    nbytes: int
    stages: tuple[int, ...]
    gaps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to run the stages of a group: other kernels, or a chain of operators in some number of tiles."""

    name: str
    changes: tuple[StageChange, ...] = ()
    savings: tuple[TileSaving, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of all stages beyond those of the first alternative."""
        return sum(change.seconds for change in self.changes)

    @property
    def joules(self) -> float:
        """Joules of all stages beyond those of the first alternative, including the static power
        of the additional seconds.
        """
        return sum(change.joules for change in self.changes)


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Stages that run by exactly one of the alternatives; the first is the stages' own."""

    name: str
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class Problem:
    """A planning problem. Budgets that are None are unlimited.

    The joules of stages, rematerializations and packing include the static power of their seconds; `static_watts` are
    drawn while the step waits for transfers.
    """

    stages: tuple[Stage, ...]
    tensors: tuple[Tensor, ...]
    ram_bytes: int | None
    deadline_s: float | None = None
    semantics: Semantics = Semantics.POET
    static_watts: float = 0.0
    targets: tuple[str, ...] = ("flash",)
    write_limit_bytes: float | None = None
    slicings: tuple[Slicing, ...] = ()
    name: str = ""
    target_bytes: tuple[int | None, ...] = ()
    """For each target, the most bytes that its pages may take at once.

    A target with such a bound is memory, for example the host's. It does not wear out, and keeps a page no longer than
    its gap. It always has a copy of a paged persistent tensor, of which no other target then has a page. None, or
    absent: a medium with space for all pages.
    """
    links: tuple[int, ...] = ()
    """For each target, the link that moves its pages; pages on one link move one after the other.

    Absent: link 0 moves all.
    """
    groups: tuple[StageGroup, ...] = ()
    """Stages with alternatives. Transfers overlap with the seconds of the first ones, regardless of the choice."""

    @cached_property
    def size(self) -> int:
        return len(self.stages)

    def limit_bytes(self, target: int) -> int | None:
        """Return the most bytes that pages may take at once in a target that is memory; None for a medium."""
        return self.target_bytes[target] if target < len(self.target_bytes) else None

    def rewritten(self, tensor: int, target: int) -> bool:
        """Return whether contents are written to a target again for each gap; if not, they are written once
        and read as often as needed.
        """
        return self.limit_bytes(target) is not None and not self.tensors[tensor].persistent

    def link(self, target: int) -> int:
        """Return the number of the link that moves a target's pages."""
        return self.links[target] if target < len(self.links) else 0

    @cached_property
    def base_seconds(self) -> float:
        """Seconds of all stages, each counted once."""
        return sum(stage.seconds for stage in self.stages)

    @cached_property
    def base_joules(self) -> float:
        """Joules of all stages, each counted once."""
        return sum(stage.joules for stage in self.stages)

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """All idle gaps, by tensor, then by time."""
        return tuple(gap for i in range(len(self.tensors)) for gap in self._gaps_of(i))

    @cached_property
    def gaps_of(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, the indices of its gaps."""
        lists: list[list[int]] = [[] for _ in self.tensors]
        for g, gap in enumerate(self.gaps):
            lists[gap.tensor].append(g)
        return tuple(map(tuple, lists))

    def gap_at(self, tensor: int, stage: int) -> int | None:
        """Return the gap in which a tensor is idle at a stage; None if it is not."""
        bounds, gaps = self._idle[tensor]
        return gaps[bisect_right(bounds, stage)]

    @cached_property
    def _idle(self) -> tuple[tuple[tuple[int, ...], tuple[int | None, ...]], ...]:
        """For each tensor, the stages at which its gap changes, and its gap before and from each of them.

        With thousands of tensors and stages, a full table would take hundreds of megabytes.
        """
        found: list[tuple[list[int], list[int | None]]] = [([], [None]) for _ in self.tensors]
        for g, gap in enumerate(self.gaps):
            bounds, gaps = found[gap.tensor]
            bounds += (gap.after + 1, min(gap.before, self.size))
            gaps += (g, None)
            if gap.before > self.size:
                gaps[0] = g
                bounds.insert(0, gap.before - self.size)
                gaps.insert(1, None)
        return tuple((tuple(bounds), tuple(gaps)) for bounds, gaps in found)

    @cached_property
    def found_versions(self) -> tuple[Mapping[int, int], ...]:
        """For each tensor: stage that creates, reads or writes it -> its version at the start of that stage."""
        return tuple({stage: tensor.version_before(stage) for stage in tensor.accesses} for tensor in self.tensors)

    def _gaps_of(self, i: int) -> list[Gap]:
        tensor, size = self.tensors[i], self.size
        found = [
            Gap(i, a, b, tensor.version_after(a))
            for a, b in zip(tensor.accesses, tensor.accesses[1:], strict=False)
            if b > a + 1
        ]
        last = tensor.accesses[-1]
        if tensor.persistent:
            before = size + tensor.accesses[0]
            if before > last:
                found.append(Gap(i, last, before, tensor.version_after(last)))
        elif last + 1 < size and any(tensor.rematerializations):
            found.append(Gap(i, last, size, tensor.version_after(last), dead=True))
        return found


def verify_problem(problem: Problem) -> None:
    """Raise ProblemError unless accesses, versions and rematerialization inputs are consistent."""
    size = problem.size
    for i, tensor in enumerate(problem.tensors):
        touched = tensor.accesses
        if not touched or list(touched) != sorted(set(touched)) or not 0 <= touched[0] <= touched[-1] < size:
            raise ProblemError(
                f"tensor {i} ({tensor.name}) has accesses {touched}; they must ascend within {size} stages"
            )
        if not set(tensor.writes) <= set(touched):
            raise ProblemError(f"tensor {i} ({tensor.name}) is written at {tensor.writes}, outside its accesses")
        if not tensor.persistent and (not tensor.writes or tensor.writes[0] != touched[0]):
            raise ProblemError(f"tensor {i} ({tensor.name}) is read before it is written")
        if tensor.nbytes < 0:
            raise ProblemError(f"tensor {i} ({tensor.name}) claims {tensor.nbytes} bytes")
        _verify_rematerializations(problem, i)
    _verify_groups(problem)


def _verify_groups(problem: Problem) -> None:
    owners: dict[tuple[int, int], int] = {}
    for c, group in enumerate(problem.groups):
        if not group.alternatives or group.alternatives[0].changes or group.alternatives[0].savings:
            raise ProblemError(f"group {c} ({group.name}) has no first alternative that changes nothing")
        for one in group.alternatives:
            for change in one.changes:
                _verify_change(problem, one, change)
            seen = list[tuple[int, int]]()
            for saving in one.savings:
                _verify_saving(problem, one, saving)
                seen += [(saving.tensor, stage) for stage in saving.stages]
            if len(set(seen)) < len(seen) or any(owners.setdefault(key, c) != c for key in seen):
                raise ProblemError(f"alternative {one.name} saves a tensor twice at one stage")


def _verify_change(problem: Problem, one: Alternative, change: StageChange) -> None:
    if not 0 <= change.stage < problem.size or sum(c.stage == change.stage for c in one.changes) > 1:
        raise ProblemError(f"alternative {one.name} changes stage {change.stage} twice, or a stage that does not exist")
    stage = problem.stages[change.stage]
    if min(stage.seconds + change.seconds, stage.workspace_bytes + change.workspace_bytes) < 0:
        raise ProblemError(f"alternative {one.name} leaves stage {change.stage} with negative time or workspace")


def _verify_saving(problem: Problem, one: Alternative, saving: TileSaving) -> None:
    tensor = problem.tensors[saving.tensor]
    own = {g for g in problem.gaps_of[saving.tensor] if not problem.gaps[g].dead}
    if tensor.persistent or not set(saving.stages) <= set(tensor.accesses) or not own.issuperset(saving.gaps):
        raise ProblemError(f"alternative {one.name} saves tensor {saving.tensor} where it is not touched or idle")
    if not 0 <= saving.nbytes <= tensor.nbytes:
        raise ProblemError(f"alternative {one.name} saves {saving.nbytes} of {tensor.nbytes} bytes")


def _verify_rematerializations(problem: Problem, i: int) -> None:
    tensor = problem.tensors[i]
    for v, rematerialization in enumerate(tensor.rematerializations):
        for u, version in rematerialization.inputs if rematerialization else ():
            if not 0 <= u < len(problem.tensors) or u == i:
                raise ProblemError(
                    f"rematerialization {v} of tensor {i} ({tensor.name}) reads tensor {u}: cyclic or out of range"
                )
            if not -1 <= version < len(problem.tensors[u].writes):
                raise ProblemError(
                    f"rematerialization {v} of tensor {i} reads version {version} of tensor {u}: no such version"
                )
            if problem.tensors[u].birth > tensor.writes[v]:
                raise ProblemError(f"tensor {i} ({tensor.name}) is rematerialized from tensor {u}, which is born later")


class GapDecision(enum.Enum):
    """What happens to a tensor in one idle gap."""

    KEEP = "keep"
    PAGE = "page"
    RECOMPUTE = "recompute"
    PACK = "pack"
    PACK_PAGE = "pack and page"


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """A gap that is not simply kept: its decision, the stage at whose start the tensor is
    restored, and the paging target.
    """

    gap: int
    stage: int
    decision: GapDecision
    target: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Decisions for a problem; gaps that do not appear are kept.

    `intermediates` are (tensor, stage) pairs. Return stages of wrapping gaps may exceed the number of stages; those of
    intermediates do not. `sliced`: indices of the slicings in use. `variants`: (group, alternative) of the groups that
    do not use their first alternative.
    """

    choices: tuple[Choice, ...] = ()
    intermediates: tuple[tuple[int, int], ...] = ()
    sliced: tuple[int, ...] = ()
    variants: tuple[tuple[int, int], ...] = ()
