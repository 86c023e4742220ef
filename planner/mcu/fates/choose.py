"""The memory plan of a budget: everything kept where that fits, else the cheapest recomputation whose arena fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.ir.errors import ExitCode, PortError
from planner.mcu.autodiff import SparseScheme
from planner.mcu.fates.board_problem import BoardProblem, board_problem
from planner.mcu.fates.core_costs import CoreCosts, core_costs
from planner.mcu.ir import Graph
from planner.mcu.memory import ArenaBudgetError, MemoryPlan, plan_memory
from planner.problem.model import Schedule
from planner.problem.replay import ScheduleCost, replay
from planner.search.solve import solve

DEFAULT_CORE = "nrf52840"
"""Whose costs decide where no board is named: what is cheapest differs little between cores, the bits not at all."""

SEARCH_S = 10.0
"""CPU seconds per attempt; nets of a few hundred steps are at their optimum within a few."""

ATTEMPTS = 8
"""How often the search is given less than the budget, by what the arena's placement took beyond the sum of its tensors."""


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

    `bound_joules`: no plan of this class recomputes for less; None where nothing had to be decided.
    """

    memory: MemoryPlan
    seconds: float
    joules: float
    overhead_joules: float
    bound_joules: float | None

    @property
    def overhead(self) -> float:
        """What recomputation adds, as a share of the joules without it."""
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
    if kept.ram_bytes <= options.ram_bytes:
        return _within(_fitted(kept, replay(stated.problem, Schedule()), None), options, core)
    return _within(_recomputed(graph, scheme, options, kept, stated, q88, simd), options, core)


def _recomputed(
    graph: Graph,
    scheme: SparseScheme,
    options: FitOptions,
    kept: MemoryPlan,
    stated: BoardProblem,
    q88: bool,
    simd: bool,
) -> FittedMemory:
    allowed = options.ram_bytes - kept.parameters.size_bytes
    target, least = allowed, least_bytes(stated)
    for _ in range(ATTEMPTS):
        problem = replace(stated.problem, ram_bytes=target, deadline_s=options.deadline_s)
        found = solve(problem, time_limit_s=options.search_s)
        if found.schedule is None or found.evaluation is None:
            least = max(least, found.needed_bytes or 0)
            break
        again = stated.recomputation(found.schedule)
        memory = plan_memory(graph, scheme, q88=q88, simd=simd, recomputation=again)
        if memory.arena.peak_bytes <= allowed:
            return _fitted(memory, found.evaluation, found.bound_joules)
        target -= max(memory.arena.peak_bytes - allowed, 1)
    parameters = kept.parameters.size_bytes
    raise ArenaBudgetError(kept.ram_bytes, options.ram_bytes, kept.arena.peak_bytes, parameters, least + parameters)


def least_bytes(stated: BoardProblem) -> int:
    """Return the bytes of the fullest step's own operands: less no recomputation can reach."""
    load = [stage.workspace_bytes for stage in stated.problem.stages]
    for tensor in stated.problem.tensors:
        for stage in tensor.accesses:
            load[stage] += tensor.nbytes
    return max(load)


def _fitted(memory: MemoryPlan, cost: ScheduleCost, bound_joules: float | None) -> FittedMemory:
    return FittedMemory(memory, cost.seconds, cost.joules, cost.overhead_joules, bound_joules)


def _within(fitted: FittedMemory, options: FitOptions, core: CoreCosts) -> FittedMemory:
    if options.deadline_s is not None and fitted.seconds > options.deadline_s:
        raise BoardDeadlineError(fitted.seconds, options.deadline_s, core.name)
    return fitted
