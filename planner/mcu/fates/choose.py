"""The memory plan of a budget: everything kept where that fits, else bands and the cheapest recomputation that fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.ir.errors import ExitCode, PortError
from planner.mcu.autodiff import SparseScheme
from planner.mcu.fates.board_problem import board_problem
from planner.mcu.fates.choose_bands import choose_bands, stage_loads
from planner.mcu.fates.core_costs import CoreCosts, core_costs
from planner.mcu.ir import Graph
from planner.mcu.memory import ArenaBudgetError, MemoryPlan, plan_memory
from planner.problem.model import Schedule
from planner.problem.replay import ScheduleCost, replay
from planner.search.solve import solve

DEFAULT_CORE = "nrf52840"
"""Whose costs decide where no board is named: what is cheapest differs little between cores, the bits not at all."""

SEARCH_S = 4.0
"""CPU seconds per attempt; nets of a few hundred steps are at their optimum within a few."""

ATTEMPTS = 12
"""How often the search is given less than the budget, by what the arena's placement took beyond the sum of its tensors,
or stages are made smaller by bands, because what lives beside them cannot be computed again."""

SMALLER = 16
"""By this part of the fullest stage, at least, the limit of stages falls from one attempt to the next."""


class BoardDeadlineError(PortError):
    """A training step that takes longer than it may, with both figures."""

    exit_code = ExitCode.IMPOSSIBLE

    def __init__(self, seconds: float, deadline_s: float, board: str) -> None:
        super().__init__(
            f"one sample takes {seconds:.3g} s on {board} (estimated), the deadline is {deadline_s:.3g} s; train fewer "
            "layers (--sparse-update), allow more RAM, or raise the deadline"
        )
        self.seconds = seconds
        self.deadline_s = deadline_s


@dataclass(frozen=True, slots=True)
class FitOptions:
    """What a memory plan is held to, and whose costs decide. `ram_bytes` covers arena and trained parameters."""

    ram_bytes: int
    core: CoreCosts | None = None
    deadline_s: float | None = None
    search_s: float = SEARCH_S


@dataclass(frozen=True, slots=True)
class FittedMemory:
    """A memory plan within its budget. Seconds and joules are of one training sample, by the board's file.

    `overhead_joules`: of bands and recomputation together. `bound_joules`: with these bands no plan recomputes for less;
    None where nothing had to be decided.
    """

    memory: MemoryPlan
    seconds: float
    joules: float
    overhead_joules: float
    bound_joules: float | None

    @property
    def overhead(self) -> float:
        """What bands and recomputation add, as a share of the joules without them."""
        return self.overhead_joules / (self.joules - self.overhead_joules)


def fit_memory(
    graph: Graph, scheme: SparseScheme, options: FitOptions, *, q88: bool = False, simd: bool = True
) -> FittedMemory:
    """Return the cheapest plan of `scheme` within the budget.

    Raises ArenaBudgetError where not even recomputation fits, BoardDeadlineError where no fitting plan is fast enough.
    """
    core = options.core or core_costs(DEFAULT_CORE)
    kept = plan_memory(graph, scheme, q88=q88, simd=simd)
    stated = board_problem(kept.program, scheme, core, kept.arena.peak_bytes, simd=simd)
    plain = replay(stated.problem, Schedule())
    if kept.ram_bytes <= options.ram_bytes:
        return _within(_fitted(kept, plain, plain.joules, None), options, core)
    return _within(_recomputed(graph, scheme, options, core, kept, plain.joules, q88, simd), options, core)


def _recomputed(
    graph: Graph, scheme: SparseScheme, options: FitOptions, core: CoreCosts, kept: MemoryPlan, plain_joules: float,
    q88: bool, simd: bool,
) -> FittedMemory:  # fmt: skip
    allowed = options.ram_bytes - kept.parameters.size_bytes
    target = limit = allowed
    for _ in range(ATTEMPTS):
        stated = choose_bands(kept.program, scheme, core, limit, simd=simd)
        fullest = max(stage_loads(stated.problem))
        problem = replace(stated.problem, ram_bytes=target, deadline_s=options.deadline_s)
        found = solve(problem, time_limit_s=options.search_s)
        if found.schedule is None or found.evaluation is None:
            if fullest > limit or limit <= 0:
                break
            limit = fullest - max((found.needed_bytes or target) - target, fullest // SMALLER)
            continue
        again = stated.recomputation(found.schedule)
        memory = plan_memory(graph, scheme, q88=q88, simd=simd, repeated=again, groups=stated.groups)
        if memory.arena.peak_bytes <= allowed:
            return _fitted(memory, found.evaluation, plain_joules, found.bound_joules)
        target -= max(memory.arena.peak_bytes - allowed, 1)
    least = max(fullest, found.needed_bytes or 0)
    parameters = kept.parameters.size_bytes
    raise ArenaBudgetError(kept.ram_bytes, options.ram_bytes, kept.arena.peak_bytes, parameters, least + parameters)


def _fitted(memory: MemoryPlan, cost: ScheduleCost, plain_joules: float, bound_joules: float | None) -> FittedMemory:
    return FittedMemory(memory, cost.seconds, cost.joules, cost.joules - plain_joules, bound_joules)


def _within(fitted: FittedMemory, options: FitOptions, core: CoreCosts) -> FittedMemory:
    if options.deadline_s is not None and fitted.seconds > options.deadline_s:
        raise BoardDeadlineError(fitted.seconds, options.deadline_s, core.name)
    return fitted
