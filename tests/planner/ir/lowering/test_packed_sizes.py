"""A plan for tensors that are denser or sparser than they were measured: within its budget, and
different only where that pays.
"""

from dataclasses import replace

import pytest

from port_planner.ir.costs import Codec
from port_planner.ir.lowering.lower import lower
from port_planner.ir.lowering.packed_sizes import with_packed_sizes
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import BudgetError, idle_gaps
from tests.agent.exactness import packing_costs
from tests.planner.steps import costs_of, tiny_step


@pytest.mark.slow
def test_what_overflows_is_packed_wider_or_paged_whichever_is_cheaper_within_the_budget() -> None:
    graph = tiny_step().graphs["step"]
    small = tuple(
        replace(c, reserved_bytes=c.reserved_bytes // 8) for c in packing_costs(graph) if c.codec is Codec.BITMAP
    )
    costs = replace(costs_of(graph), packings=small)
    versions = {(c.storage, c.version) for c in small}
    decisions = tuple(
        Decision(s, a, b, Action.PACK)
        for s in sorted({s for s, _ in versions})
        for a, b in idle_gaps(graph, s)
        if (s, sum(w <= a for w in graph.writers[s])) in versions
    )
    plan = Plan(decisions)
    tight = replace(plan, ram_bytes=lower(graph, costs, plan).peak_bytes)
    wanted = {(c.storage, c.version): 8 * c.reserved_bytes for c in small}
    wider, made = with_packed_sizes(graph, costs, tight, wanted)
    assert {(c.storage, c.version): c.reserved_bytes for c in wider.packings} == wanted
    program = lower(graph, wider, made)
    assert program.peak_bytes == made.peak_bytes <= tight.ram_bytes
    assert [(d.storage, d.after, d.before) for d in made.decisions] == [
        (d.storage, d.after, d.before) for d in decisions
    ]
    dear = replace(costs.device, flash=replace(costs.device.flash, write_joules_per_byte=1.0))
    roomy = with_packed_sizes(graph, replace(costs, device=dear), plan, wanted)[1]
    assert {d.action for d in roomy.decisions} == {Action.PACK}
    (one, *_) = sorted(versions)
    fewer, without = with_packed_sizes(graph, costs, plan, {one: None})
    assert len(fewer.packings) == len(small) - 1
    assert {d.storage for d in without.decisions if d.action is Action.PAGE} == {one[0]}
    with pytest.raises(BudgetError):
        with_packed_sizes(graph, costs, replace(plan, ram_bytes=1), wanted)


def test_what_sparser_tensors_leave_keeps_in_ram_what_was_on_flash() -> None:
    graph = tiny_step().graphs["step"]
    dear = replace(costs_of(graph).device.flash, write_joules_per_byte=1.0)
    costs = replace(
        costs_of(graph),
        device=replace(costs_of(graph).device, flash=dear),
        packings=tuple(c for c in packing_costs(graph) if c.codec is Codec.BITMAP),
    )
    reserved = {(c.storage, c.version): c.reserved_bytes for c in costs.packings}
    gaps = {s: max(idle_gaps(graph, s), key=lambda gap: gap[1] - gap[0]) for s in {s for s, _ in reserved}}
    first, second, *_ = sorted(gaps, key=lambda s: -graph.storages[s].nbytes)
    plan = Plan(
        tuple(sorted(Decision(s, *gaps[s], Action.PACK if s == first else Action.PAGE) for s in (first, second)))
    )
    tight = replace(plan, ram_bytes=lower(graph, costs, plan).peak_bytes)
    same = with_packed_sizes(graph, costs, tight, {})[1]
    assert same.decisions == tight.decisions
    sparser = {key: nbytes // 20 for key, nbytes in reserved.items()}
    narrower, made = with_packed_sizes(graph, costs, tight, sparser)
    program = lower(graph, narrower, made)
    assert not any(d.action in (Action.PAGE, Action.PACK_PAGE) for d in made.decisions)
    assert program.peak_bytes == made.peak_bytes <= tight.ram_bytes
    assert program.written_bytes == 0 < lower(graph, costs, plan).written_bytes
