"""The memory plan of a budget: everything is kept if it fits, else the cheapest bands,
recomputation and paging that fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from port_planner.base.errors import ExitCode, PortError
from port_planner.mcu.autodiff import SparseScheme
from port_planner.mcu.board_problem import BoardProblem, PageOptions, board_problem
from port_planner.mcu.choose_tiles import choose_tiles, stage_loads
from port_planner.mcu.core_costs import CoreCosts, core_costs
from port_planner.mcu.ir import Graph
from port_planner.mcu.memory import (
    ArenaBudgetError,
    MemoryPlan,
    PageUse,
    mse_target_bytes,
    parameter_block_bytes,
    plan_memory,
)
from port_planner.mcu.page_costs import PageCosts, PageMedium, page_costs
from port_planner.mcu.parameter_trips import skip_parameter_trips
from port_planner.problem.problem import Schedule
from port_planner.problem.replay import ScheduleCost, replay
from port_planner.search.solve import solve

DEFAULT_CORE = "nrf52840"
"""The board whose costs decide if none is named: the cheapest plan differs little between cores,
and its bits do not differ.
"""

SEARCH_S = 4.0
"""CPU seconds per attempt; networks of a few hundred steps reach their optimum within a few."""

ATTEMPTS = 12
"""Number of searches with less than the budget. It is reduced by what the arena took beyond the sum of its tensors, or
stages are made smaller by bands, because what lives alongside them cannot be recomputed."""

SMALLER = 16
"""Least share of the fullest stage by which a stage's limit falls from one attempt to the next."""


class BoardDeadlineError(PortError):
    """Raised when a training step takes longer than its deadline, with both figures."""

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
    """The limits of a memory plan, and the board whose costs decide. `ram_bytes` covers arena and trained parameters.

    `page`: external memory for paged tensors, and for trained parameters if it is memory-mapped; None: no paging.
    """

    ram_bytes: int
    core: CoreCosts | None = None
    deadline_s: float | None = None
    search_s: float = SEARCH_S
    page: PageMedium | None = None


@dataclass(frozen=True, slots=True)
class FittedMemory:
    """A memory plan within its budget. Seconds and joules are those of one training sample, by the board's file.

    `overhead_joules`: of bands, recomputation and paging together. `bound_joules`: with these bands, no plan recomputes
    and pages for less. It is None if nothing had to be decided, or if parameters are paged: it does not cover what is
    kept of them between samples. `page_costs`: of the medium, if something is paged.
    """

    memory: MemoryPlan
    seconds: float
    joules: float
    overhead_joules: float
    bound_joules: float | None
    page_costs: PageCosts | None = None

    @property
    def overhead(self) -> float:
        """What bands, recomputation and paging add, as a share of the joules without them."""
        return self.overhead_joules / (self.joules - self.overhead_joules)


def fit_memory(graph: Graph, scheme: SparseScheme, options: FitOptions, *, simd: bool = True) -> FittedMemory:
    """Return the cheapest plan of `scheme` within the budget.

    Raises ArenaBudgetError if nothing fits even with recomputation, BoardDeadlineError if no
    fitting plan is fast enough.
    """
    core = options.core or core_costs(DEFAULT_CORE)
    kept = plan_memory(graph, scheme, simd=simd)
    stated = board_problem(kept.program, scheme, core, kept.arena.peak_bytes, simd=simd)
    plain = replay(stated.problem, Schedule())
    if kept.ram_bytes <= options.ram_bytes:
        return _within(_fitted(kept, plain, plain.joules, None), options, core)
    _refuse_hopeless(graph, kept, options)
    fit = _Fit(graph, scheme, options, core, kept, plain.joules, simd)
    return _within(fit.best(), options, core)


def _refuse_hopeless(graph: Graph, kept: MemoryPlan, options: FitOptions) -> None:
    """Raise ArenaBudgetError, before any search, for a budget that no plan can meet.

    Every plan holds the parameters or, if they are paged, one sample.
    """
    on_medium = options.page is not None and options.page.holds_parameters
    held, what = kept.parameters.size_bytes, "trained parameters"
    if on_medium:
        held, what = graph.input_shape.elements, "one sample"
    if options.ram_bytes < held:
        raise ArenaBudgetError(
            kept.ram_bytes,
            options.ram_bytes,
            kept.arena.peak_bytes,
            kept.parameters.size_bytes,
            note=f"No plan takes less than the {held} B of {what}",
        )


@dataclass(frozen=True)
class _Fit:
    """The search for a plan within a budget that cannot hold everything.

    `kept`, `plain_joules`: the plan that keeps everything, and its cost.
    """

    graph: Graph
    scheme: SparseScheme
    options: FitOptions
    core: CoreCosts
    kept: MemoryPlan
    plain_joules: float
    simd: bool

    def best(self) -> FittedMemory:
        """Return the cheapest plan, with parameters in RAM or, if the medium may hold them, on the medium.

        Falls back to plans without the medium if the search finds none with it.
        """
        medium = self.options.page
        if medium is None:
            return self.plan(None)
        costs = page_costs(self.core.name, medium, self.core)
        found: list[FittedMemory] = []
        failed: list[ArenaBudgetError] = []
        for parameters in (False, True) if medium.holds_parameters else (False,):
            try:
                found.append(self.plan(PageOptions(costs, parameters)))
            except ArenaBudgetError as error:
                failed.append(error)
        if not found:
            with contextlib.suppress(ArenaBudgetError):
                return self.plan(None)
            raise min(failed, key=lambda error: error.least_bytes or error.needed_bytes)
        return min(found, key=lambda fitted: fitted.joules)

    def _stated(self, limit: int, pages: PageOptions | None) -> BoardProblem:
        if self.scheme.chosen is not None:  # channels are ranked by whole gradients, never by bands
            return board_problem(self.kept.program, self.scheme, self.core, limit, simd=self.simd, pages=pages)
        return choose_tiles(self.kept.program, self.scheme, self.core, limit, simd=self.simd, pages=pages)

    def plan(self, pages: PageOptions | None) -> FittedMemory:
        """Return the cheapest plan found. Raises ArenaBudgetError if nothing fits."""
        options, kept = self.options, self.kept
        parameters = 0 if pages is not None and pages.parameters else kept.parameters.size_bytes
        allowed, targets = options.ram_bytes - parameters, mse_target_bytes(self.graph)
        target = limit = allowed - targets
        fullest, needed = 0, None
        for _ in range(ATTEMPTS):
            stated = self._stated(limit, pages)
            fullest = max(stage_loads(stated.problem))
            problem = replace(stated.problem, ram_bytes=target, deadline_s=options.deadline_s)
            found = solve(problem, time_limit_s=options.search_s)
            needed = found.needed_bytes
            if found.schedule is None or found.evaluation is None:
                if fullest > limit or limit <= 0:
                    break
                limit = fullest - max((needed or target) - target, fullest // SMALLER)
                continue
            use, paging = None, stated.paging(found.schedule)
            if pages is not None and (paging.transfers or paging.parameters):
                medium = pages.costs.medium
                use = PageUse(medium.value, medium.block_bytes, paging)
            planned = partial(
                plan_memory,
                self.graph,
                self.scheme,
                simd=self.simd,
                repeated=stated.recomputation(found.schedule),
                groups=stated.groups,
            )
            memory = planned(pages=use)
            if memory.arena.peak_bytes <= allowed:
                costs = None if pages is None or use is None else pages.costs
                fitted = _fitted(memory, found.evaluation, self.plain_joules, found.bound_joules, costs)
                return fitted if use is None else self._spared(fitted, use, planned)
            target -= max(memory.arena.peak_bytes - allowed, 1)
        least = min(kept.ram_bytes, max(fullest, needed or 0) + parameters + targets)
        raise ArenaBudgetError(
            kept.ram_bytes,
            options.ram_bytes,
            kept.arena.peak_bytes,
            kept.parameters.size_bytes,
            least,
            "" if pages is None or pages.costs.medium.holds_parameters else self._parameters_stay(pages.costs),
        )

    def _spared(self, fitted: FittedMemory, use: PageUse, planned: Callable[..., MemoryPlan]) -> FittedMemory:
        """Return the plan without the parameter transfers that its unused RAM makes unnecessary."""
        if fitted.page_costs is None or not use.paging.parameters:
            return fitted
        found = skip_parameter_trips(
            self.graph, self.scheme, self.core, fitted.page_costs, fitted.memory, use, self.options.ram_bytes, planned
        )
        return replace(
            fitted,
            memory=found.memory,
            seconds=fitted.seconds - found.saved_seconds,
            joules=fitted.joules - found.saved_joules,
            overhead_joules=fitted.overhead_joules - found.saved_joules,
            bound_joules=None,
        )

    def _parameters_stay(self, costs: PageCosts) -> str:
        """Return why a medium holds no trained parameters, and what that would cost."""
        written = sum(
            costs.paging(parameter_block_bytes(op, self.scheme.of(op.name))).joules_out for op in self.graph.weighted()
        )
        wears = (
            ""
            if costs.endurance_cycles is None
            else f" and wear its blocks out in {costs.endurance_cycles:,.0f} samples"
        )
        return (
            f"Trained parameters stay in RAM with {costs.medium.value}: to write them back would take "
            f"{1e3 * written:.3g} mJ of every sample beside {1e3 * self.plain_joules:.3g} mJ of training{wears}; "
            "--page psram holds them"
        )


def _fitted(
    memory: MemoryPlan,
    cost: ScheduleCost,
    plain_joules: float,
    bound_joules: float | None,
    costs: PageCosts | None = None,
) -> FittedMemory:
    return FittedMemory(memory, cost.seconds, cost.joules, cost.joules - plain_joules, bound_joules, costs)


def _within(fitted: FittedMemory, options: FitOptions, core: CoreCosts) -> FittedMemory:
    if options.deadline_s is not None and fitted.seconds > options.deadline_s:
        raise BoardDeadlineError(fitted.seconds, options.deadline_s, core.name)
    return fitted
