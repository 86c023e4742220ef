"""A plan for tensors that proved denser or sparser than they were measured."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import PlanError, Program

MAX_TRIED = 64
"""The number of contents, largest first, for which every option is tried by lowering the step; the others are paged."""
_PACKS = (Action.PACK, Action.PACK_PAGE)


def with_packed_sizes(
    graph: StepGraph, costs: CostTable, plan: Plan, needed: Mapping[tuple[int, int], int | None]
) -> tuple[CostTable, Plan]:
    """Return costs with the measured sizes of packed forms, and the cheapest plan within its budget.

    It differs from `plan` for contents that need more memory and, if some need less, may keep paged contents in RAM.
    `needed`: bytes to reserve, by storage and version (`PackingCost`); None: it cannot be packed. Raises PlanError, and
    BudgetError if even paging the overflowing contents does not fit.
    """
    pairs = [(c, needed.get((c.storage, c.version), c.reserved_bytes)) for c in costs.packings]
    wider = {(c.storage, c.version) for c, n in pairs if n is None or n > c.reserved_bytes}
    sparser = any(n is not None and n < c.reserved_bytes for c, n in pairs)
    costs = replace(costs, packings=tuple(replace(c, reserved_bytes=n) for c, n in pairs if n is not None))
    ordered = graph.reordered(plan.order) if plan.order else graph

    def version(d: Decision) -> tuple[int, int]:
        return d.storage, sum(w <= d.after for w in ordered.writers[d.storage])

    overflowed = [d for d in plan.decisions if d.action in _PACKS and version(d) in wider]
    best: dict[Decision, Decision | None] = {d: replace(d, action=Action.PAGE) for d in overflowed}
    least = lower(graph, costs, _exchanged(plan, best))
    on_flash = [d for d in plan.decisions if d.action in (Action.PAGE, Action.PACK_PAGE) and d.after < d.before]
    open_to_change = [d for d in overflowed if needed[version(d)] is not None]
    open_to_change += [d for d in on_flash if sparser and d not in best]
    packable = {(c.storage, c.version) for c in costs.packings}
    contents = sorted({version(d) for d in open_to_change}, key=lambda v: -graph.storages[v[0]].nbytes)
    for key in contents[:MAX_TRIED]:
        gaps = [d for d in open_to_change if version(d) == key]  # together: a page is written once for all of them
        candidates = list(_packed_candidates(len(costs.device.targets))) if key in packable else []
        for candidate in [*candidates, None] if sparser else candidates:
            best, least = _cheaper(
                graph,
                costs,
                plan,
                (best, least),
                {d: candidate and replace(d, action=candidate[0], target=candidate[1]) for d in gaps},
            )
    made = _exchanged(plan, best)
    return costs, replace(made, peak_bytes=least.peak_bytes, seconds=least.seconds, joules=least.joules)


def _cheaper(
    graph: StepGraph,
    costs: CostTable,
    plan: Plan,
    known: tuple[dict[Decision, Decision | None], Program],
    others: Mapping[Decision, Decision | None],
) -> tuple[dict[Decision, Decision | None], Program]:
    """Return the known decisions and program, or a variant with some decisions replaced if
    that is valid and cheaper.
    """
    tried = {**known[0], **others}
    try:
        found = lower(graph, costs, _exchanged(plan, tried))
    except PlanError:
        return known
    return (tried, found) if found.cost_joules < known[1].cost_joules else known


def _packed_candidates(targets: int) -> Iterator[tuple[Action, int]]:
    yield Action.PACK, 0
    for target in range(targets):
        yield Action.PACK_PAGE, target


def _exchanged(plan: Plan, others: Mapping[Decision, Decision | None]) -> Plan:
    """Return the plan with some decisions replaced, or removed."""
    decisions = (others.get(d, d) for d in plan.decisions)
    return replace(plan, decisions=tuple(sorted(d for d in decisions if d is not None)))
