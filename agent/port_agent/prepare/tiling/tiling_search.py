"""Search for tilings of a job: estimated, compared, measured and planned as they are found."""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from port_agent.prepare.tiling.comparing import tiled_with
from port_agent.prepare.tiling.tiled_job import CutTarget, PlanCost, TiledJob, blocked_keys, cost_of_plan, main_step
from port_planner import make_bundle
from port_planner.ir.bundle.manifest import first_shapes
from port_planner.ir.costs import CostTable
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.search.floor import floor_of
from port_planner.search.joint_tiling import solve_tiling
from port_planner.search.plan_step import base_joules
from port_planner.tiling.chains import Chain, touched_bytes
from port_planner.tiling.rewriting import RewrittenGraph
from port_planner.tiling.tile_costs import tile_costs
from port_planner.tiling.tilings import Tiling, first_tilings, kinds, other_counts, tile_fat

MAX_ESTIMATED_RATIO = 1.05
"""Multiple of the whole's joules: tilings with a higher estimate are not measured, and those with a
higher cost are not refined.
"""

ESTIMATED_HIGH = 1.1
"""Ratio by which estimates of tilings may exceed measurements: 8 to 11 % for the transformer
of `examples/shakespeare`.
"""

MIN_GAIN = 0.01
"""Share of the joules that changes must gain; if they gain less, no more are tried."""

MAX_STARTS = 2
"""Largest number of tilings that are refined."""

JOINT_S = 5.0
"""Seconds for each solve of the joint model; one takes 1 to 3 seconds."""

MAX_KINDS = 6
"""Largest number of kinds of chains for which changes are tried: those that touch most bytes."""

TOGETHER = 4
"""Number of graphs that are compared and measured at once; one of 5,000 operators takes tens of megabytes
of planning's own budget.
"""

MANY_OPS, MANY_TIMES = 5000, 3
"""Number of operators, and multiple of those of the halves.

A larger graph is planned only if no other has a plan, because planning it takes long and more copies seldom pay.
"""


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a tiling needs, known before planning; with less of any of these, a plan may cost less."""

    joules: float
    floor_bytes: int
    kept_bytes: int
    """The peak when everything is kept."""
    touched_bytes_s: float
    """Bytes that each operator touches, times the seconds that it runs."""

    def dominates(self, other: "_Needs") -> bool:
        """Return whether this needs no more of anything than another one does."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(mine <= theirs for mine, theirs in pairs)


def _needs(graph: StepGraph, costs: CostTable) -> _Needs:
    joules = base_joules(costs)
    kept = lower(graph, costs, Plan(), check_budget=False).peak_bytes
    touched = sum(touched_bytes(graph, i) * op.seconds for i, op in enumerate(costs.ops))
    return _Needs(joules, floor_of(graph, costs).nbytes, kept, touched)


def cpu_s() -> float:
    """Return the CPU time of this process and of its finished children."""
    return sum(os.times()[:4])


@dataclass(slots=True)
class _Estimate:
    """The estimated needs of a tiled graph, assuming that a byte costs the same in tiles as in the whole."""

    tiling: Tiling
    needs: _Needs
    joules: float | None = None
    """Cost of a quick plan in joules, infinite if none fits; None: not planned yet."""


class TilingSearch:
    """Tilings of the halves, planned as they are found for one budget; `best` is the cheapest."""

    def __init__(
        self,
        whole: TiledJob,
        presplit: TiledJob,
        target: CutTarget,
        quick: make_bundle.PlanFunction,
        search_s: float,
        known_joules: float,
        *,
        reordered: bool = False,
    ) -> None:
        self.presplit, self.target, self.quick = presplit, target, quick
        self.device, self.ram_bytes = target.device, target.ram_bytes
        graphs = presplit.captured.graphs
        self.graphs = {name: graphs[name] for name in first_shapes(graphs) if graphs[name].device == CPU}
        self.best: PlanCost | None = None
        self.untiled: PlanCost | None = None
        """The halves without any other tiling."""
        self.starts: list[PlanCost] = []
        """Tilings with which the search begins."""
        self.finest = presplit
        """The graph with the most operators among the initial tilings."""
        self.too_large: dict[str, Tiling] | None = None
        """The tiling that needs least among those that may all lack a plan."""
        self.search_s, self.end_s = search_s, cpu_s() + search_s
        self.known_joules = known_joules
        """Joules of the cheapest plan known from other searches."""
        self.orders = (False, True) if reordered else (False,)
        """Whether chains sum over their tiles, for each way that is tried."""
        self.seen = [_needs(*main_step(whole, target.device))]
        """Needs of the tilings that were planned."""
        self.estimates: list[_Estimate] = []
        """Needs of the tilings that were estimated."""

    @property
    def many_ops(self) -> int:
        """Number of operators above which a graph is too large to be planned beside others."""
        return min(MANY_OPS, MANY_TIMES * len(main_step(self.presplit, self.device)[0].ops))

    @property
    def late(self) -> bool:
        """Whether the time for trying is over."""
        return cpu_s() > self.end_s

    def plan(self, job: TiledJob) -> PlanCost | None:
        """Plan a tiling and return its cost; None if it has no plan, or needs no less of
        anything than an earlier one.
        """
        needs = _needs(*main_step(job, self.device))
        if any(before.dominates(needs) for before in self.seen):
            return None
        self.seen.append(needs)
        found = cost_of_plan(job, self.device, self.ram_bytes, self.quick)
        if found is not None:
            self.best = found if self.best is None or found.joules < self.best.joules else self.best
        return found

    def plan_starts(self) -> None:
        """Plan the tilings that the joint model chooses; if none has a plan, plan all chains
        with one number of tiles.
        """
        self.untiled = self.plan(self.presplit)
        if not self.graphs:
            return
        candidates = first_tilings(next(iter(self.graphs.values())), self.ram_bytes - self.device.base_bytes)
        least = self.known_joules if self.best is None else min(self.known_joules, self.best.joules)
        if math.isfinite(least):
            # chains of the largest operators alone: above the floor they save most
            joint = self._joint(self._uniform(candidates[-1:]))
            self._plan_likely(joint, least)
            # for tilings that cost more than estimated: kernels here differ from the model's assumptions
            if joint and all(found.joules >= least for found in self.starts):
                self._plan_likely(self._fitting(self._uniform(candidates)), least)
            return
        # if nothing fits yet, look for what does, which neither the model nor estimates of workspaces predict reliably
        uniform = self._uniform(candidates)
        self._plan_each(self._promising(self._joint(uniform), math.inf, MAX_STARTS))
        if not self.starts:
            self._plan_uniform([candidate for candidate in uniform if self._first_tiled(candidate).replacements])

    def nearest(self) -> TiledJob:
        """Return the tried tiling that needs least, compared and measured, which shows what is
        missing if nothing has a plan.
        """
        if self.too_large is not None and self.ram_bytes > self.device.base_bytes:
            (self.finest,) = self._made([self.too_large])
        return min(self.presplit, self.finest, key=lambda job: floor_of(*main_step(job, self.device)).nbytes)

    def _plan_likely(self, candidates: list[dict[str, Tiling]], least: float) -> None:
        """Plan the tilings that may cost less than `least` by estimates, and do not have too many operators."""
        few = [
            candidate
            for candidate in candidates
            if (tiling := self._first_tiled(candidate)).replacements and len(tiling.graph.ops) <= self.many_ops
        ]
        self._plan_each(self._promising(few, MAX_ESTIMATED_RATIO * ESTIMATED_HIGH * least, MAX_STARTS))

    def _plan_uniform(self, candidates: list[dict[str, Tiling]]) -> None:
        """Plan these one after another until one has a plan, the shortest graphs first."""
        fitting = self._fitting(candidates)
        if candidates and not fitting:
            self.too_large = min(candidates, key=self._bare_floor)
        few = [candidate for candidate in fitting if len(self._first_tiled(candidate).graph.ops) <= self.many_ops]
        likely = self._promising(few, math.inf, MAX_STARTS)
        rest = [candidate for candidate in few if not any(candidate is one for one in likely)]
        for some in (likely, rest, [candidate for candidate in fitting if not any(candidate is one for one in few)]):
            if not self.starts:
                self._plan_each(some)

    def _uniform(self, candidates: Sequence[tuple[int, int]]) -> list[dict[str, Tiling]]:
        """Return all chains of large operators with one number of tiles, for each definition of large."""
        apart = blocked_keys(self.presplit)
        return [
            {name: tile_fat(graph, *candidate, apart, sums=sums) for name, graph in self.graphs.items()}
            for candidate, sums in itertools.product(candidates, self.orders)
        ]

    def _joint(self, uniform: list[dict[str, Tiling]]) -> list[dict[str, Tiling]]:
        """Return the joint model's tilings of these chains that may have a plan, without what it leaves whole."""
        found, seen = list[dict[str, Tiling]](), list[list[Chain]]()
        graph, costs = main_step(self.presplit, self.device)
        for candidate in uniform:
            name, tiling = next(iter(candidate.items()))
            chains = [chain for chain, _ in tiling.counted]
            if not chains or chains in seen:
                continue
            seen.append(chains)
            chosen = solve_tiling(graph, costs, self.ram_bytes, tiling, JOINT_S)
            most = 1 if chosen is None else max((count for _, count in chosen.counted), default=1)
            if chosen is not None and most > 1:
                found.append({other: tiling.changed_all(most) for other, tiling in candidate.items()} | {name: chosen})
        return self._fitting(found)

    def _first_tiled(self, candidate: Mapping[str, Tiling]) -> RewrittenGraph:
        """Return the first graph with a tiling."""
        name, tiling = next(iter(candidate.items()))
        return tiling.applied(self.graphs[name])

    def _fitting(self, candidates: list[dict[str, Tiling]]) -> list[dict[str, Tiling]]:
        """Return the tilings that may have a plan; comparing others, such as those of a large head, takes
        minutes and shows nothing.
        """
        return [candidate for candidate in candidates if self._bare_floor(candidate) <= self.ram_bytes]

    def _bare_floor(self, candidate: Mapping[str, Tiling]) -> int:
        """Return the least bytes of the first graph with a tiling, without the workspace of its operators' kernels."""
        graph, costs = self._tiled(candidate[next(iter(candidate))])
        bare = tuple(replace(cost, workspace_bytes=0) for cost in costs.ops)
        return floor_of(graph, replace(costs, ops=bare)).nbytes

    def _plan_each(self, candidates: list[dict[str, Tiling]]) -> None:
        for job in sorted(
            self._made(candidates) if candidates else [], key=lambda job: len(main_step(job, self.device)[0].ops)
        ):
            self.finest = job
            if (found := self.plan(job)) is not None:
                self.starts.append(found)

    def _promising(
        self, candidates: list[dict[str, Tiling]], below_joules: float, most: int
    ) -> list[dict[str, Tiling]]:
        """Return those of lowest estimated cost, at most `most`, and below `below_joules`.

        Comparing and measuring a tiling takes many times as long as planning it.
        """
        estimated = ((self._estimated_joules(candidate), n) for n, candidate in enumerate(candidates))
        return [candidates[n] for joules, n in sorted(estimated)[:most] if joules < below_joules]

    def _better(
        self, candidates: list[dict[str, Tiling]], start: Mapping[str, Tiling], most: int
    ) -> list[dict[str, Tiling]]:
        """Return at most `most` tilings that are estimated to cost least, and less than `start`,
        skipping those that need no less.
        """
        begin = self._estimate(start).needs
        open_candidates = [
            candidate for candidate in candidates if not begin.dominates(self._estimate(candidate).needs)
        ]
        return self._promising(open_candidates, self._estimated_joules(start), most) if open_candidates else []

    def _estimate(self, candidate: Mapping[str, Tiling]) -> _Estimate:
        """Return the estimated needs of the first graph with a tiling, computed once."""
        tiling = candidate[next(iter(candidate))]
        known = next((one for one in self.estimates if one.tiling == tiling), None)
        if known is None:
            known = _Estimate(tiling, _needs(*self._tiled(tiling)))
            self.estimates.append(known)
        return known

    def _estimated_joules(self, candidate: Mapping[str, Tiling]) -> float:
        """Return the cost of a quick plan if tiles cost what the whole does; infinite if none fits."""
        estimate = self._estimate(candidate)
        if estimate.joules is None:
            graph, costs = self._tiled(estimate.tiling)
            plan = self.quick(graph, costs, self.ram_bytes).plan
            estimate.joules = math.inf if plan is None else base_joules(costs) + plan.overhead_joules
        return estimate.joules

    def _tiled(self, tiling: Tiling) -> tuple[StepGraph, CostTable]:
        """Return the tiled first graph, and the estimated costs of its operators."""
        graph, costs = main_step(self.presplit, self.device)
        rewritten = tiling.applied(graph)
        return rewritten.graph, replace(costs, ops=tile_costs(graph, costs.ops, rewritten))

    def plan_changes(self, max_joules: float) -> None:
        """Change the best tilings as long as that pays, except those that cost more than `max_joules`.

        Half of the time is reserved for this, however long comparing and measuring those tilings took.
        """
        name = next(iter(self.graphs), "")
        near = [found for found in self.starts if found.joules <= max_joules and name in found.sliced.tilings]
        self.end_s = max(self.end_s, cpu_s() + self.search_s / 2)
        for start in sorted(near, key=lambda found: found.joules)[:MAX_STARTS]:
            if self.late:
                return
            graph, tiling = self.graphs[name], start.sliced.tilings[name]
            alike = kinds(graph, tiling.applied(graph))[:MAX_KINDS]
            better = start
            while not self.late and (changed := self._changed(name, alike, better)) is not None:
                gained, better = better.joules - changed.joules, changed
                if gained < MIN_GAIN * changed.joules:
                    break

    def _changed(self, name: str, alike: Sequence[frozenset[int]], start: PlanCost) -> PlanCost | None:
        """Plan a tiling with one kind of chain in another number of tiles, including 1, and then with
        all such changes that paid.

        Return the cheapest; None if nothing costs less than `start`.
        """
        tilings = start.sliced.tilings
        tiling = tilings[name]
        changes = [(ops, n) for ops in alike for n in other_counts(tiling.count(ops))]
        candidates = [{**tilings, name: tiling.changed(*change)} for change in changes]
        chosen = self._better(candidates, tilings, TOGETHER)
        planned = [
            (changes[candidates.index(candidate)], self.plan(job))
            for candidate, job in zip(chosen, self._made(chosen), strict=True)
        ]
        paid = [(change, found) for change, found in planned if found is not None and found.joules < start.joules]
        paid.sort(key=lambda pair: -pair[1].joules)
        if not paid:
            return None
        best = paid[-1][1]
        if len({ops for (ops, _), _ in paid}) > 1:
            for change, _ in paid:  # the cheapest change of a kind comes last
                tiling = tiling.changed(*change)
            (together,) = self._made([{**tilings, name: tiling}])
            found = self.plan(together)
            best = best if found is None or found.joules > best.joules else found
        return best if name in best.sliced.tilings else None

    def _made(self, candidates: list[dict[str, Tiling]]) -> list[TiledJob]:
        """Return the halves cut in each of these ways."""
        return tiled_with(
            self.presplit, candidates, self.target.allowed, self.device.compute_watts, self.target.progress
        )
