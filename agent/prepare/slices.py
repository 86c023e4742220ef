"""Steps with operators in pieces, where this machine's kernels give the bits of the whole.

What is rewritten is first run beside the original in a process of its own, with the bundle's number of threads.
"""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from agent.prepare.bench.bench import Bench
from agent.prepare.bundle import Progress
from planner import make_bundle
from planner.ir.bundle.bundle import PlannedLimits, first_shapes
from planner.ir.costs import CostTable, DeviceCosts, OpCost
from planner.ir.devices.kinds import CPU
from planner.ir.graph import GraphError, StepGraph
from planner.ir.lowering.lower import lower
from planner.ir.operand_rules import verify_operands
from planner.ir.plan import Plan
from planner.make_bundle import Prepared
from planner.profiling import kept_costs
from planner.profiling.operators import Measured
from planner.search.floor import floor_of
from planner.search.pieces.joint import joint_cut
from planner.search.plan_step import base_joules
from planner.slices.blocks import LargeWeight, blocks_of, large_weights, read_in_blocks
from planner.slices.chains import Chain, touched_bytes
from planner.slices.choices import OF_THE_ROOM, Cut, cut_fat, first_cuts, kinds, other_counts
from planner.slices.comparison import Differing, form_key
from planner.slices.costs_in_pieces import costs_in_pieces
from planner.slices.gradients import split_gradients
from planner.slices.in_place import write_in_place
from planner.slices.norms import NORM_BACKWARD, norms_by_channels
from planner.slices.pixels import as_products
from planner.slices.rewriting import Replacement, Rewritten, compacted


@dataclass(frozen=True, slots=True)
class Sliced:
    """A job whose graphs have operators in pieces, what they cost, and what was left whole and why."""

    prepared: Prepared
    measured: Measured
    left_whole: tuple[str, ...]
    in_pieces: tuple[str, ...] = ()
    """The chains that run in pieces."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """By graph: what `in_pieces` was made of."""
    uncut: Mapping[str, StepGraph] = field(default_factory=dict)
    """What those graphs were before."""


_Made = TypeVar("_Made")

NEAR = 1.05
"""Of the whole's joules: pieces that are estimated to cost more are not measured, and those that do are not worked on further."""

ESTIMATED_HIGH = 1.1
"""Estimates of pieces are dearer than what is measured by up to so much: 8 to 11 % for the transformer of `examples/shakespeare`."""

WORTH = 0.01
"""Of the joules: where changes gain less, no more are tried."""

CLOSE, APART = 0.01, 0.05
"""Of the joules: ways that quick plans tell apart by less than the second may be planned properly before one of them is taken; at least by
the first, once it is known how little that saves."""

MOST_STARTS = 2
"""Cuts that are worked on."""

JOINT_S = 5.0
"""For each look at the joint model; one takes 1 to 3 seconds."""

MOST_KINDS = 6
"""Of chains, those that touch most bytes: what is changed about each is tried."""

SEARCH_S, LEAST_SEARCH_S = 60.0, 6.0
"""Of CPU time, for comparing, measuring and planning what is tried for one budget: after that, nothing further is changed. The shorter
where the whole has a plan, which pieces can only make cheaper."""

TOGETHER = 4
"""Of graphs that are compared and measured at once: one of 5,000 operators takes tens of megabytes of the budget that planning has, too."""

MANY_OPS, MANY_TIMES = 5000, 3
"""A graph with more, or so many times those of the halves, is planned only where no other has a plan: its plan takes long, and more
copies seldom pay."""

LARGE = 1 / 2
"""Of the step's own memory: weights that take more are read in blocks."""

BLOCK = 1 / 8
"""Of the step's own memory: what a block of them takes, with the optimizer's state of the same rows."""

COLUMNS_BLOCK = 1 / 4
"""The same of a block of columns that is put together from rows: for each, all rows are read."""

MOST_BLOCKS = 16
"""More would be copied and read in transfers too small."""

NORM_PIECES = 8
"""Of channels, into which the backward pass of a batch norm is cut: its copies are little beside what stays whole."""

NEAR_THE_FLOOR = 1.5
"""Of what the step's floor needs beside the process: with more memory, norms whose copies take time are left whole."""

QUICK_S = 5.0
"""Of planning, for each way that is compared."""

_COMPARED = 0.5
"""Of the stage that compares pieces, what is done where their costs are known: the rest is quick plans with them."""


@dataclass(frozen=True, slots=True)
class ComparingRoom:
    """What the process that compares may take: bytes of RAM, a directory for what has no room there, threads; and that process."""

    ram_bytes: int
    page_dir: Path
    threads: int
    bench: Bench = field(default_factory=Bench)


def in_halves(
    prepared: Prepared, measured: Measured, room: ComparingRoom, compute_watts: float, progress: Progress
) -> Sliced:
    """Return the job with every convolution's backward pass in halves and pointwise operators in place, measured anew.

    Convolutions of single pixels are products of matrices where that pays.

    Raises TrialError where a process that compares or measures fails.
    """
    halves, left = _rewritten(prepared, split_gradients, room)
    graphs, odd = _rewritten(replace(prepared, graphs=halves), write_in_place, room)
    left += odd
    sliced = Sliced(prepared, measured, tuple(left))
    if any(graphs[name] != graph for name, graph in prepared.graphs.items()):
        graphs = {name: compacted(graph) for name, graph in graphs.items()}
        again = measured_again(graphs, measured, room, compute_watts, progress)
        sliced = Sliced(replace(prepared, graphs=graphs), again, tuple(left))
    return with_products(sliced, room, compute_watts, progress)


def with_products(sliced: Sliced, room: ComparingRoom, compute_watts: float, progress: Progress) -> Sliced:
    """Return the job with those convolutions of single pixels as products of matrices that take no more joules so.

    Raises TrialError where a process that compares or measures fails.
    """
    before = sliced.prepared.graphs
    graphs, left = _rewritten(sliced.prepared, as_products, room)
    if graphs == before:
        return replace(sliced, left_whole=(*sliced.left_whole, *left))
    fresh = measured_again(graphs, sliced.measured, room, compute_watts, progress)
    tables = list[tuple[OpCost, ...]]()
    for (name, graph), old, new in zip(before.items(), sliced.measured.ops, fresh.ops, strict=True):
        chosen = [mine.joules <= theirs.joules for mine, theirs in zip(new, old, strict=True)]
        ops = tuple(
            graphs[name].ops[i] if yes else op for i, (op, yes) in enumerate(zip(graph.ops, chosen, strict=True))
        )
        graphs[name] = compacted(replace(graphs[name], ops=ops))
        tables.append(tuple(mine if yes else theirs for mine, theirs, yes in zip(new, old, chosen, strict=True)))
    made = replace(sliced.prepared, graphs=graphs)
    return Sliced(made, replace(sliced.measured, ops=tuple(tables)), (*sliced.left_whole, *left))


def _rewritten(
    prepared: Prepared, rewrite: Callable[[StepGraph, frozenset[int]], Rewritten], room: ComparingRoom
) -> tuple[dict[str, StepGraph], list[str]]:
    """Return a job's graphs rewritten but for what gives other bits here, and what that is."""
    graphs, left = dict(prepared.graphs), list[str]()
    tried = {
        name: rewrite(graph, frozenset()) for name, graph in graphs.items() if graph.device == CPU
    }  # kernels known here
    for (name, new), found in zip(tried.items(), compared(_pairs(prepared, tried), room), strict=True):
        left += [f"{d.replacement.what}: {d.where}" for d in found]
        odd = frozenset(i for d in found for i in d.replacement.old)
        graphs[name] = rewrite(prepared.graphs[name], odd).graph if odd else new.graph
    return graphs, left


def in_pieces(
    whole: Sliced, halved: Sliced, device: DeviceCosts, ram_bytes: int, room: ComparingRoom, planner: make_bundle.Planner,
    progress: Progress, limits: PlannedLimits, *, reordered: bool = False,
) -> Sliced:  # fmt: skip
    """Return the job whole, in halves or with chains of operators in pieces, whichever costs least in `ram_bytes`.

    Graphs of further shapes stay as they are in `halved` (`further_shapes`). `reordered`: whether chains may sum over their pieces, in
    another order than the whole. All ways that are tried are compared and measured; quick plans decide, and between what they choose, the halves and the whole, plans
    of `planner` where those may tell otherwise. Where nothing fits, the halves. Raises TrialError where a process fails.
    """
    quick = make_bundle.default_planner(strategy="greedy", time_limit_s=QUICK_S, limits=limits)
    least = cost_of_plan(whole, device, ram_bytes, quick)
    if least is not None and least.keeps_everything:
        return whole
    best: PlanCost | None = None
    blocked = in_blocks(halved, device, ram_bytes, room, progress)
    by_channels = in_channels(halved, device, ram_bytes, room, progress)
    tried, finest = list[_Ways](), halved
    search_s = SEARCH_S if least is None else LEAST_SEARCH_S
    for base in (halved, *by_channels, *blocked):
        known = [found.joules for found in (least, best) if found is not None]
        ways = _Ways(
            whole, base, device, ram_bytes, room, quick, progress, search_s, min(known, default=math.inf), reordered=reordered
        )  # fmt: skip
        ways.plan_starts()
        ways.plan_changes(math.inf if least is None else NEAR * least.joules)
        finest = ways.finest
        tried.append(ways)
        if ways.best is not None and (best is None or ways.best.joules < best.joules):
            best = ways.best
    if best is None:
        return whole if least is not None else finest if blocked or by_channels else halved
    if least is not None and least.joules <= best.joules:
        return whole
    halves = [found] if (found := tried[0].uncut) is not None and found is not best else []
    planned = [best, *halves, *([] if least is None else [least])]
    return _cheapest(planned, lambda sliced: cost_of_plan(sliced, device, ram_bytes, planner), tried[-1].end_s).sliced


def _cheapest(
    quick: Sequence["PlanCost"], plan: Callable[[Sliced], "PlanCost | None"], end_s: float = math.inf
) -> "PlanCost":
    """Return the way that costs least by `plan`, of those with `quick` plans; the cheapest of these where none has another.

    Where it is not far from the others, they are planned one after the other, the cheapest first, for as long as the next one may win: if
    planning saved twice as large a share of its cost as it did of those before, and until so much CPU time was taken.
    """
    found: PlanCost | None = None
    saved = 0.0
    order = sorted(quick, key=lambda one: one.joules)
    if all(one.joules * (1 - APART) >= order[0].joules for one in order[1:]):
        return order[0]
    for one in order:
        if _cpu_s() > end_s:
            break
        if found is not None and one.joules * (1 - max(2 * saved, CLOSE)) >= found.joules:
            break
        better = plan(one.sliced)
        if better is not None:
            saved = max(saved, 1 - better.joules / one.joules)
            found = better if found is None or better.joules < found.joules else found
    return found or order[0]


def in_channels(
    halved: Sliced, device: DeviceCosts, ram_bytes: int, room: ComparingRoom, progress: Progress
) -> list[Sliced]:
    """Return the job with fat batch norms' backward passes by channels, measured anew; nothing unless one sets a floor near the budget.

    Raises TrialError where a process that compares or measures fails.
    """
    floor, own_bytes = floor_of(*_main(halved, device)), ram_bytes - device.base_bytes
    if floor.name != NORM_BACKWARD or own_bytes > NEAR_THE_FLOOR * (floor.nbytes - device.base_bytes):
        return []
    (share, _), *_ = OF_THE_ROOM
    graphs, left = _rewritten(
        halved.prepared, lambda graph, odd: norms_by_channels(graph, int(share * own_bytes), NORM_PIECES, odd), room
    )
    if graphs == halved.prepared.graphs:
        return []
    made = replace(halved.prepared, graphs={name: compacted(graph) for name, graph in graphs.items()})
    sliced = Sliced(made, halved.measured, (*halved.left_whole, *left))
    return _measured([sliced], room, device.compute_watts, progress)


def in_blocks(
    halved: Sliced, device: DeviceCosts, ram_bytes: int, room: ComparingRoom, progress: Progress
) -> list[Sliced]:
    """Return the job with the weights in blocks that take much of `ram_bytes`, measured anew; nothing where none does.

    Raises TrialError where a process that compares or measures fails.
    """
    prepared, own_bytes = halved.prepared, ram_bytes - device.base_bytes
    graphs = prepared.graphs
    if own_bytes <= 0 or prepared.job.pruning is not None or any(graph.device != CPU for graph in graphs.values()):
        return []
    large = [w for w in large_weights(graphs.values(), int(LARGE * own_bytes)) if _can_be_blocks(prepared, w)]
    blocks = {w.name: blocks_of(w, *block_counts(w, own_bytes)) for w in large}
    rewritten = {name: read_in_blocks(graph, blocks) for name, graph in graphs.items()}
    left = list(halved.left_whole)
    for name, found in zip(graphs, compared(_pairs(prepared, rewritten), room), strict=True):
        left += [f"{d.replacement.what}: {d.where}" for d in found]
        for weight in {weight for d in found for weight in _weights_of(graphs[name], d.replacement)}:
            blocks.pop(weight, None)
    if not blocks:
        return []
    found_graphs = {name: compacted(read_in_blocks(graph, blocks).graph) for name, graph in graphs.items()}
    by_key = {key: blocks[w.name] for w in large if w.name in blocks for key in w.keys}
    made = make_bundle.with_blocks(prepared, found_graphs, by_key)
    return _measured([Sliced(made, halved.measured, tuple(left))], room, device.compute_watts, progress)


def block_counts(weight: LargeWeight, own_bytes: int) -> tuple[int, int]:
    """Return into how many blocks a weight is cut where so many bytes are the step's own, and into how many of columns if it is trained."""
    block, columns = (max(int(share * own_bytes), 1) for share in (BLOCK, COLUMNS_BLOCK))
    count = -(-weight.nbytes * (1 + len(weight.states)) // block)
    return min(MOST_BLOCKS, count), min(MOST_BLOCKS, -(-weight.nbytes // columns))


def _can_be_blocks(prepared: Prepared, weight: LargeWeight) -> bool:
    """Say whether weight and state lie row by row, and the weight has contents of its own."""
    layouts = [prepared.layouts[key] for key in weight.keys]
    rows = weight.shape, (weight.shape[1], 1), 0
    alike = all((layout.shape, layout.stride, layout.offset) == rows for layout in layouts)
    return alike and isinstance(prepared.tensors[weight.keys[0]], torch.Tensor)


def _weights_of(graph: StepGraph, replacement: Replacement) -> set[str]:
    return {graph.storages[s].name for i in replacement.old for s in graph.reads[i]}


def again_with_base(make: Callable[[DeviceCosts], _Made], device: DeviceCosts) -> _Made:
    """Return what is made for `device`; where nothing fits, once more for one that holds what a trial found beside the step.

    Pieces are chosen before any trial, and near the floor of the step others are needed where the worker holds more than was measured
    operator by operator. Raises InfeasibleError where nothing fits then either, or no trial found more.
    """
    try:
        return make(device)
    except make_bundle.InfeasibleError as error:
        if error.base_bytes is None or error.base_bytes <= device.base_bytes:
            raise
        return make(replace(device, base_bytes=error.base_bytes))


@dataclass(frozen=True, slots=True)
class PlanCost:
    """What a plan costs in all, wear included, and whether it moves nothing."""

    sliced: Sliced
    joules: float
    keeps_everything: bool


def cost_of_plan(sliced: Sliced, device: DeviceCosts, ram_bytes: int, planner: make_bundle.Planner) -> PlanCost | None:
    """Return what a plan of the main graph costs; None where none fits."""
    graph, costs = _main(sliced, device)
    found = planner(graph, costs, ram_bytes).plan
    if found is None:
        return None
    return PlanCost(sliced, base_joules(costs) + found.overhead_joules, not found.decisions and not found.sliced)


def _main(sliced: Sliced, device: DeviceCosts) -> tuple[StepGraph, CostTable]:
    return next(iter(sliced.prepared.graphs.values())), CostTable(device, sliced.measured.ops[0])


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a way to cut takes before anything is planned; with less of any, a plan may cost less."""

    joules: float
    floor_bytes: int
    kept_bytes: int
    """The peak with everything kept."""
    touched_bytes_s: float
    """What each operator touches, for as long as it runs."""

    def dominates(self, other: "_Needs") -> bool:
        """Say whether this takes no more of anything."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(mine <= theirs for mine, theirs in pairs)


def _needs(graph: StepGraph, costs: CostTable) -> _Needs:
    joules = base_joules(costs)
    kept = lower(graph, costs, Plan(), check_budget=False).peak_bytes
    touched = sum(touched_bytes(graph, i) * op.seconds for i, op in enumerate(costs.ops))
    return _Needs(joules, floor_of(graph, costs).nbytes, kept, touched)


def _cpu_s() -> float:
    """Return the CPU time of this process and of those it has waited for."""
    return sum(os.times()[:4])


@dataclass(slots=True)
class _Estimate:
    """What a cut graph would take where a byte in pieces costs what it does in the whole."""

    cut: Cut
    needs: _Needs
    joules: float | None = None
    """What a quick plan costs, infinite where none fits; None: not planned yet."""


class _Ways:
    """Ways to cut the halves, planned as they come for one budget; `best` is the cheapest."""

    def __init__(
        self, whole: Sliced, halved: Sliced, device: DeviceCosts, ram_bytes: int, room: ComparingRoom,
        quick: make_bundle.Planner, progress: Progress, search_s: float, known_joules: float, *, reordered: bool = False,
    ) -> None:  # fmt: skip
        self.halved, self.device, self.ram_bytes = halved, device, ram_bytes
        self.room, self.quick, self.progress = room, quick, progress
        graphs = halved.prepared.graphs
        self.graphs = {name: graphs[name] for name in first_shapes(graphs) if graphs[name].device == CPU}
        self.best: PlanCost | None = None
        self.uncut: PlanCost | None = None
        """The halves with nothing else in pieces."""
        self.starts: list[PlanCost] = []
        """Cuts to begin with."""
        self.finest = halved
        """Of the cuts to begin with, the graph with the most operators."""
        self.search_s, self.end_s = search_s, _cpu_s() + search_s
        self.known_joules = known_joules
        """What the cheapest plan of another way costs."""
        self.orders = (False, True) if reordered else (False,)
        """Whether chains sum over their pieces, of the ways to be tried."""
        self.seen = [_needs(*_main(whole, device))]
        """Of what was planned."""
        self.estimates: list[_Estimate] = []
        """Of the ways that were looked at."""

    @property
    def many_ops(self) -> int:
        """Of how many operators a graph has too many to be planned beside others."""
        return min(MANY_OPS, MANY_TIMES * len(_main(self.halved, self.device)[0].ops))

    @property
    def late(self) -> bool:
        """Whether the time for trying is up."""
        return _cpu_s() > self.end_s

    def plan(self, tried: Sliced) -> PlanCost | None:
        """Plan a way and return what it costs; None where it has no plan, or takes no less of anything than one before."""
        needs = _needs(*_main(tried, self.device))
        if any(before.dominates(needs) for before in self.seen):
            return None
        self.seen.append(needs)
        found = cost_of_plan(tried, self.device, self.ram_bytes, self.quick)
        if found is not None:
            self.best = found if self.best is None or found.joules < self.best.joules else self.best
        return found

    def plan_starts(self) -> None:
        """Plan the cuts that the joint model chooses; where nothing has a plan, all chains in one number of pieces too."""
        self.uncut = self.plan(self.halved)
        if not self.graphs:
            return
        ways = first_cuts(next(iter(self.graphs.values())), self.ram_bytes - self.device.base_bytes)
        least = self.known_joules if self.best is None else min(self.known_joules, self.best.joules)
        if math.isfinite(least):
            # Of the chains of the fattest operators alone: above the floor they save most.
            joint = self._joint(self._uniform(ways[-1:]))
            self._plan_likely(joint, least)
            # What costs more than its estimate promised: then kernels here are not what the model took them for.
            if joint and all(found.joules >= least for found in self.starts):
                self._plan_likely(self._fitting(self._uniform(ways)), least)
            return
        # Where nothing fits yet, what does is looked for, which neither the model nor estimates of workspaces tell for certain.
        uniform = self._uniform(ways)
        self._plan_each(self._promising(self._joint(uniform), math.inf, MOST_STARTS))
        if not self.starts:
            self._plan_uniform([way for way in uniform if self._first_cut(way).replacements])

    def _plan_likely(self, ways: list[dict[str, Cut]], least: float) -> None:
        """Plan those that may cost less than `least` by estimates, and do not have too many operators."""
        few = [
            way for way in ways if (cut := self._first_cut(way)).replacements and len(cut.graph.ops) <= self.many_ops
        ]
        self._plan_each(self._promising(few, NEAR * ESTIMATED_HIGH * least, MOST_STARTS))

    def _plan_uniform(self, ways: list[dict[str, Cut]]) -> None:
        """Plan these until one has a plan, the shortest graphs first."""
        fitting = self._fitting(ways)
        if ways and not fitting:
            self.finest = self._unmeasured(min(ways, key=self._bare_floor))
        few = [way for way in fitting if len(self._first_cut(way).graph.ops) <= self.many_ops]
        likely = self._promising(few, math.inf, MOST_STARTS)
        rest = [way for way in few if not any(way is one for one in likely)]
        for some in (likely, rest, [way for way in fitting if not any(way is one for one in few)]):
            if not self.starts:
                self._plan_each(some)

    def _uniform(self, ways: Sequence[tuple[int, int]]) -> list[dict[str, Cut]]:
        """Return all chains of fat operators in one number of pieces, for each meaning of fat."""
        apart = keys_in_blocks(self.halved)
        return [
            {name: cut_fat(graph, *way, apart, sums=sums) for name, graph in self.graphs.items()}
            for way, sums in itertools.product(ways, self.orders)
        ]

    def _joint(self, uniform: list[dict[str, Cut]]) -> list[dict[str, Cut]]:
        """Return those that may have a plan of what the joint model makes of these chains, but for what it leaves whole."""
        found, seen = list[dict[str, Cut]](), list[list[Chain]]()
        graph, costs = _main(self.halved, self.device)
        for way in uniform:
            name, cut = next(iter(way.items()))
            chains = [chain for chain, _ in cut.counted]
            if not chains or chains in seen:
                continue
            seen.append(chains)
            chosen = joint_cut(graph, costs, self.ram_bytes, cut, JOINT_S)
            most = 1 if chosen is None else max((count for _, count in chosen.counted), default=1)
            if chosen is not None and most > 1:
                found.append({other: cut.changed_all(most) for other, cut in way.items()} | {name: chosen})
        return self._fitting(found)

    def _first_cut(self, way: Mapping[str, Cut]) -> Rewritten:
        """Return the first graph cut in a way."""
        name, cut = next(iter(way.items()))
        return cut.applied(self.graphs[name])

    def _fitting(self, ways: list[dict[str, Cut]]) -> list[dict[str, Cut]]:
        """Return the ways that may have a plan: comparing others, of a large head say, takes minutes and tells nothing."""
        return [way for way in ways if self._bare_floor(way) <= self.ram_bytes]

    def _bare_floor(self, way: Mapping[str, Cut]) -> int:
        """Return what the first graph cut in a way needs at least, bytes, whatever room its operators' kernels take."""
        graph, costs = self._cut(way[next(iter(way))])
        bare = tuple(replace(cost, workspace_bytes=0) for cost in costs.ops)
        return floor_of(graph, replace(costs, ops=bare)).nbytes

    def _unmeasured(self, way: Mapping[str, Cut]) -> Sliced:
        """Return the halves cut in a way with what that is estimated to cost: of one that does not fit, to say by how much."""
        prepared, measured = self.halved.prepared, self.halved.measured
        graphs, ops = dict(prepared.graphs), dict(zip(prepared.graphs, measured.ops, strict=True))
        for name, cut in way.items():
            rewritten = cut.applied(graphs[name])
            ops[name] = costs_in_pieces(graphs[name], ops[name], rewritten)
            graphs[name] = rewritten.graph
        made, costs = replace(prepared, graphs=graphs), replace(measured, ops=tuple(ops.values()))
        return replace(self.halved, prepared=made, measured=costs, cuts=way)

    def _plan_each(self, ways: list[dict[str, Cut]]) -> None:
        for tried in sorted(self._made(ways) if ways else [], key=lambda tried: len(_main(tried, self.device)[0].ops)):
            self.finest = tried
            if (found := self.plan(tried)) is not None:
                self.starts.append(found)

    def _promising(self, ways: list[dict[str, Cut]], below_joules: float, most: int) -> list[dict[str, Cut]]:
        """Return those, at `most`, that cost least by estimates, and less than `below_joules`.

        Comparing and measuring a way takes many times as long as planning it.
        """
        estimated = ((self._estimated_joules(way), n) for n, way in enumerate(ways))
        return [ways[n] for joules, n in sorted(estimated)[:most] if joules < below_joules]

    def _better(self, ways: list[dict[str, Cut]], start: Mapping[str, Cut], most: int) -> list[dict[str, Cut]]:
        """Return those, at `most`, that cost least by estimates, and less than `start`; what takes no less of anything is not planned."""
        begin = self._estimate(start).needs
        open_ways = [way for way in ways if not begin.dominates(self._estimate(way).needs)]
        return self._promising(open_ways, self._estimated_joules(start), most) if open_ways else []

    def _estimate(self, way: Mapping[str, Cut]) -> _Estimate:
        """Return what the first graph cut in a way would take; it is looked at once."""
        cut = way[next(iter(way))]
        known = next((one for one in self.estimates if one.cut == cut), None)
        if known is None:
            known = _Estimate(cut, _needs(*self._cut(cut)))
            self.estimates.append(known)
        return known

    def _estimated_joules(self, way: Mapping[str, Cut]) -> float:
        """Return what a quick plan costs where pieces cost what the whole does; infinite where none fits."""
        estimate = self._estimate(way)
        if estimate.joules is None:
            graph, costs = self._cut(estimate.cut)
            plan = self.quick(graph, costs, self.ram_bytes).plan
            estimate.joules = math.inf if plan is None else base_joules(costs) + plan.overhead_joules
        return estimate.joules

    def _cut(self, cut: Cut) -> tuple[StepGraph, CostTable]:
        """Return the first graph in pieces, and what its operators are estimated to cost."""
        graph, costs = _main(self.halved, self.device)
        rewritten = cut.applied(graph)
        return rewritten.graph, replace(costs, ops=costs_in_pieces(graph, costs.ops, rewritten))

    def plan_changes(self, most_joules: float) -> None:
        """Change the best cuts for as long as that pays; one that costs more than `most_joules` is not worth it.

        There is half of the time for it, whatever comparing and measuring those cuts took.
        """
        name = next(iter(self.graphs), "")
        near = [found for found in self.starts if found.joules <= most_joules and name in found.sliced.cuts]
        self.end_s = max(self.end_s, _cpu_s() + self.search_s / 2)
        for start in sorted(near, key=lambda found: found.joules)[:MOST_STARTS]:
            if self.late:
                return
            graph, cut = self.graphs[name], start.sliced.cuts[name]
            alike = kinds(graph, cut.applied(graph))[:MOST_KINDS]
            better = start
            while not self.late and (changed := self._changed(name, alike, better)) is not None:
                gained, better = better.joules - changed.joules, changed
                if gained < WORTH * changed.joules:
                    break

    def _changed(self, name: str, alike: Sequence[frozenset[int]], start: PlanCost) -> PlanCost | None:
        """Plan a cut with one kind of chain in another number of pieces, 1 of them too, and with all such changes that paid.

        Return the cheapest; None where nothing costs less than `start`.
        """
        cuts = start.sliced.cuts
        cut = cuts[name]
        changes = [(ops, n) for ops in alike for n in other_counts(cut.count(ops))]
        ways = [{**cuts, name: cut.changed(*change)} for change in changes]
        chosen = self._better(ways, cuts, TOGETHER)
        planned = [
            (changes[ways.index(way)], self.plan(tried)) for way, tried in zip(chosen, self._made(chosen), strict=True)
        ]
        paid = [(change, found) for change, found in planned if found is not None and found.joules < start.joules]
        paid.sort(key=lambda pair: -pair[1].joules)
        if not paid:
            return None
        best = paid[-1][1]
        if len({ops for (ops, _), _ in paid}) > 1:
            for change, _ in paid:  # the cheapest change of a kind comes last
                cut = cut.changed(*change)
            (together,) = self._made([{**cuts, name: cut}])
            found = self.plan(together)
            best = best if found is None or found.joules > best.joules else found
        return best if name in best.sliced.cuts else None

    def _made(self, ways: list[dict[str, Cut]]) -> list[Sliced]:
        """Return the halves cut in each of these ways."""
        return cut_in(self.halved, ways, self.room, self.device.compute_watts, self.progress)


def keys_in_blocks(sliced: Sliced) -> frozenset[str]:
    """Return the keys of blocks of weights, whose readers stay out of chains."""
    return frozenset(key for one in sliced.prepared.blocks.values() for key in (*one.rows, *one.columns))


def cut_in(
    base: Sliced, ways: Sequence[Mapping[str, Cut]], room: ComparingRoom, compute_watts: float, progress: Progress
) -> list[Sliced]:
    """Return a job with these graphs, whole in `base`, cut in each of these ways, without what differs here, all compared and measured at once.

    Raises TrialError where a process that compares or measures fails.
    """
    prepared = base.prepared
    rewritten = [{name: cut.applied(prepared.graphs[name]) for name, cut in way.items()} for way in ways]
    differing = iter(compared([pair for new in rewritten for pair in _pairs(prepared, new)], room))
    made = []
    for way, tried in zip(ways, rewritten, strict=True):
        graphs, left, what = dict(prepared.graphs), [*base.left_whole], [*base.in_pieces]
        cuts, uncut = dict(base.cuts), dict(base.uncut)
        for name, new in tried.items():
            cut, found = way[name], next(differing)
            left += [f"{d.replacement.what}: {d.where}" for d in found]
            if found:
                cut = cut.changed((i for d in found for i in d.replacement.old), 1)
                new = cut.applied(prepared.graphs[name])
            try:
                verify_operands(new.graph)
            except GraphError as error:  # pieces of what only a whole operator is known to have checked
                left.append(str(error).partition(";")[0])
                continue
            if new.replacements:
                graphs[name], cuts[name], uncut[name] = new.graph, cut, prepared.graphs[name]
                what += [r.what for r in new.replacements]
        made.append(Sliced(replace(prepared, graphs=graphs), base.measured, tuple(left), tuple(what), cuts, uncut))
    known = {id(graph): ops for graph, ops in zip(prepared.graphs.values(), base.measured.ops, strict=True)}
    return _measured(made, room, compute_watts, progress, known)


def _measured(
    made: list[Sliced], room: ComparingRoom, compute_watts: float, progress: Progress,
    known: Mapping[int, tuple[OpCost, ...]] = {},
) -> list[Sliced]:  # fmt: skip
    """Return the same with what their operators cost. `known`: of graphs that are measured already, by their `id`."""
    graphs = [graph for sliced in made for graph in sliced.prepared.graphs.values() if id(graph) not in known]
    if not graphs:
        return made
    ops = iter(room.bench.measure(graphs, room.threads, compute_watts, progress, resident=False).ops)
    progress("compare", _COMPARED)
    tables = [[known.get(id(g)) or next(ops) for g in sliced.prepared.graphs.values()] for sliced in made]
    return [replace(s, measured=replace(s.measured, ops=tuple(of_it))) for s, of_it in zip(made, tables, strict=True)]


def _pairs(prepared: Prepared, rewritten: Mapping[str, Rewritten]) -> list[tuple[StepGraph, Rewritten]]:
    return [(prepared.graphs[name], new) for name, new in rewritten.items()]


def measured_again(
    graphs: Mapping[str, StepGraph], before: Measured, room: ComparingRoom, compute_watts: float, progress: Progress
) -> Measured:
    """Return the costs of rewritten graphs; what the process itself holds was measured `before`, and the trial shows what they add."""
    fresh = room.bench.measure(graphs.values(), room.threads, compute_watts, progress, resident=False)
    progress("compare", _COMPARED)
    return replace(before, ops=fresh.ops)


def compared(pairs: Sequence[tuple[StepGraph, Rewritten]], room: ComparingRoom) -> tuple[tuple[Differing, ...], ...]:
    """Return of each graph which replacements do not give the original's bits with so many threads on this machine.

    Of those alike, in whatever graph, one is run. What was found is kept in the user's cache for the next plan, by operators, shapes and layouts. Raises TrialError where the
    process that finds out fails.
    """
    name, folder = kept_costs.context(room.threads, 0, workspace_seen=False), kept_costs.cache_folder("pieces")
    known = kept_costs.read_kept(folder, name, dict[str, str]) or {}
    keys = [[form_key(graph, rewritten, r) for r in rewritten.replacements] for graph, rewritten in pairs]
    unknown, asked = list[tuple[StepGraph, Rewritten]](), {*known}
    for (graph, rewritten), of in zip(pairs, keys, strict=True):
        first = {key: r for r, key in zip(rewritten.replacements, of, strict=True) if key not in asked}
        asked |= first.keys()
        if first:
            unknown.append((graph, replace(rewritten, replacements=tuple(first.values()))))
    if unknown:
        beside = room.bench.compare(unknown, room.threads, room.ram_bytes, room.page_dir)
        for (graph, rewritten), found in zip(unknown, beside, strict=True):
            known |= {form_key(graph, rewritten, r): "" for r in rewritten.replacements}
            known |= {form_key(graph, rewritten, d.replacement): d.where for d in found}
        kept_costs.write_kept(folder, name, known)
    return tuple(
        tuple(Differing(r, known[key]) for r, key in zip(rewritten.replacements, of, strict=True) if known[key])
        for (_, rewritten), of in zip(pairs, keys, strict=True)
    )
