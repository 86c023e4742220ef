"""Neighbourhood search: all decisions except those of a few gaps are fixed to the best
schedule, and the rest is solved.

If the LP is weak (graphs with much recomputation at tight budgets), a solver on the whole model finds almost
nothing. On neighbourhoods of fifty gaps it finds the optimum in a fraction of a second. Neighbourhoods are
ordered by size, because most joules belong to large tensors, and by time, the stage at which the gaps end or
start. So the search is deterministic.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from port_planner.milp.highs import HighsSession, SolverStatus
from port_planner.milp.milp_model import Formulation
from port_planner.milp.restriction import Restriction
from port_planner.milp.telescoped import run_relaxed
from port_planner.problem.problem import Schedule
from port_planner.search import clock
from port_planner.search.incumbent import Climb, GainRate

WINDOW_GAP = 5e-3


@dataclass(frozen=True, slots=True)
class NeighbourhoodSize:
    """How large neighbourhoods are: `first` gaps, later at least `least`; adapted by counts
    that are equal in every run.

    The next neighbourhood has more gaps if one took fewer than `few` simplex iterations without gain. It has fewer if
    one took more than `many`, or was not solved within this many `nodes` of the solver's tree. `seconds`: the processor
    time that a neighbourhood may take on any machine.
    """

    first: int
    least: int
    few: int
    many: int
    nodes: int
    seconds: float


NARROW, WIDE = NeighbourhoodSize(12, 6, 150, 600, 10, 1.0), NeighbourhoodSize(24, 10, 400, 4000, 100, 3.0)
"""Sizes of small neighbourhoods, which gain most in little time, and of larger ones, which then find changes
of many decisions at once.
"""


def neighbourhood_search(state: Climb, formulation: Formulation, seconds: float, min_gain: float = 0.0) -> None:
    """Improve the best schedule neighbourhood by neighbourhood for at most `seconds` of CPU time, in small
    neighbourhoods and then in larger ones.

    Each phase ends once a pass over all gaps lowers the step's cost by less than the share `min_gain`.
    """
    if state.schedule is None or formulation.start_values(state.schedule) is None:
        return
    search = _Search(state, formulation)
    stop_at = state.left - seconds
    for size in (NARROW, WIDE):
        _search_neighbourhoods(search, size, stop_at, min_gain)


def _search_neighbourhoods(search: "_Search", size: NeighbourhoodSize, stop_at: float, min_gain: float) -> None:
    state, search.tile = search.state, size.first
    quiet, rate = 0, GainRate(state, min_gain)
    for gaps in search.neighbourhoods():
        if rate.is_too_low(search.patience() // 4) or quiet > search.patience():
            return
        if state.left <= max(stop_at, 0.05) or state.proven:
            return
        status, improved, iterations = search.improve(gaps, min(size.seconds, state.left - stop_at), size.nodes)
        quiet = 0 if improved else quiet + 1
        if status is not SolverStatus.OPTIMAL or iterations > size.many:
            search.tile = max(int(search.tile * 0.7), size.least)
        elif iterations < size.few and not improved:
            search.tile = int(search.tile * 1.2) + 1


class _Search:
    """A model whose neighbourhoods are freed in turn and solved while the rest stays fixed."""

    def __init__(self, state: Climb, formulation: Formulation) -> None:
        self.state, self.formulation = state, formulation
        self.restriction = Restriction(formulation.model)
        self.tile = NARROW.first
        self.integral = formulation.decisions()
        self.owner = self._owners()
        self.hiding = dict.fromkeys(formulation.hiding, 0.0)
        """Large transfers that are hidden under the best schedule; without them, HiGHS takes
        long to complete a start.
        """
        self._allow_present_seconds()

    def _allow_present_seconds(self) -> None:
        """Allow every schedule the seconds that the best one takes according to the model.

        The model overestimates them; the judge knows better.
        """
        row, state = self.formulation.deadline_row, self.state
        start = None if state.schedule is None else self.formulation.start_values(state.schedule)
        if row is None or start is None:
            return
        limit = self.restriction.limit_row(row, np.inf)
        values = np.array([start[c] for c in self.integral])
        left = self.restriction.bounded(self.integral, values, values)
        run = run_relaxed(left.model, state.wall(max(state.left, NARROW.seconds)))
        if run.values is not None:
            limit = max(limit, self.restriction.row_value(row, left.whole(run.values)))
        self.restriction.limit_row(row, limit)

    def _owners(self) -> dict[int, int]:
        """Return the gap to which each integral column belongs."""
        found = {}
        for g, columns in self.formulation.gaps.items():
            own = [columns.keep, *columns.recompute.values(), *columns.page.values(), *columns.packing()]
            found.update(dict.fromkeys(own, g))
        return found

    def patience(self) -> int:
        """Return the number of neighbourhoods without improvement after which to stop: every order was then tried."""
        return 4 * (2 * len(self.formulation.gaps) // self.tile + 2)

    def neighbourhoods(self) -> Iterator[list[int]]:
        """Yield neighbourhoods of gaps forever, overlapping by half, in four orders."""
        problem = self.formulation.problem
        gaps = list(self.formulation.gaps)
        ends = sorted(gaps, key=lambda g: (problem.gaps[g].before % problem.size, g))
        starts = sorted(gaps, key=lambda g: (problem.gaps[g].after, g))
        sizes = sorted(gaps, key=lambda g: (-problem.tensors[problem.gaps[g].tensor].nbytes, g))
        while gaps:
            for order in (sizes, ends, starts, _shuffled(gaps)):
                at = 0
                while at < len(order):
                    yield order[at : at + self.tile]
                    at += self.tile // 2

    def improve(self, gaps: list[int], seconds: float, nodes: int) -> tuple[SolverStatus, bool, int]:
        """Solve for the decisions of `gaps` in at most this many nodes; return status, whether it
        improved, and iterations.
        """
        state, formulation = self.state, self.formulation
        schedule = state.schedule
        start = formulation.start_values(schedule) if schedule is not None else None
        if start is None or schedule is None:
            return SolverStatus.NOTHING, False, 0
        free = self._free_columns(set(gaps), schedule)
        values = np.array([start[c] for c in self.integral])
        mask = np.array([c in free for c in self.integral])
        left = self.restriction.bounded(self.integral, np.where(mask, 0.0, values), np.where(mask, 1.0, values))
        session = HighsSession(left.model)
        session.start_from(left.start(start | self.hiding))
        run = session.run(state.wall(seconds), gap=WINDOW_GAP, node_limit=nodes)
        before = state.cost
        if run.values is None:
            clock.note_attempt()
        else:
            found = left.whole(run.values)
            if state.offer(formulation.schedule(found), f"neighbourhood of {len(gaps)}"):
                self.hiding = {c: float(np.round(found[c])) for c in self.hiding}
        return run.status, state.cost < before * (1 - 1e-9), run.iterations

    def _free_columns(self, gaps: set[int], schedule: Schedule) -> set[int]:
        """Return the columns of `gaps`, and of the intermediates that their decisions may
        require or make unnecessary.
        """
        problem, formulation = self.formulation.problem, self.formulation
        tensors = {problem.gaps[g].tensor for g in gaps}
        stages = {s % problem.size for g in gaps for s in formulation.gaps[g].recompute}
        used = set(schedule.intermediates)
        free = {c for c, g in self.owner.items() if g in gaps}
        free |= {v for (i, s), v in formulation.intermediates.items() if s in stages or i in tensors or (i, s) in used}
        return free | {*formulation.slices.values(), *formulation.variants.values()}


def _shuffled(gaps: list[int]) -> list[int]:
    """Return the gaps in an order without structure, which is the same every time."""
    return sorted(gaps, key=lambda g: (g * 2654435761) % 4294967296)
