"""Groups of stages made of chains: their costs are the estimates, and they save what exists in tiles alone."""

from dataclasses import replace

import pytest

from port_planner.ir.costs import CostTable, OpCost
from port_planner.problem.coarsen import Coarse, coarsen
from port_planner.problem.problem import verify_problem
from port_planner.tiling import tiles
from port_planner.tiling.chains import touched_bytes
from port_planner.tiling.stage_groups import ChainGroups, chain_groups
from port_planner.tiling.tile_costs import tile_costs
from port_planner.tiling.tilings import Tiling, kinds, tile_fat
from tests.planner.steps import costs_of
from tests.planner.tiling.language_step import language_step


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)


def groups() -> tuple[Coarse, Tiling, ChainGroups]:
    """Return the groups of a language model's step: a loss head, an attention, an MLP."""
    graph = language_step().graphs["step"]
    seconds = [1e-5 + touched_bytes(graph, i) / 2e9 for i in range(len(graph.ops))]
    costs = CostTable(costs_of(graph).device, tuple(OpCost(s, 1 << 14, 2 * s) for s in seconds))
    coarse, cut = coarsen(graph, costs, ram_bytes=4 << 20), tile_fat(graph, 280_000, 4)
    return coarse, cut, chain_groups(coarse, cut)


def test_each_kind_of_chain_is_a_group_of_a_sound_problem() -> None:
    coarse, cut, found = groups()
    verify_problem(replace(coarse.problem, groups=found.groups))
    assert found.ops == tuple(kinds(coarse.graph, cut.applied(coarse.graph)))
    for group, counts in zip(found.groups, found.counts, strict=True):
        assert counts[:3] == (1, 2, 4) and len(group.alternatives) == len(counts)
    first, *others = found.ops
    changed = found.chosen(cut, {0: 2})
    assert changed.count(first) == 4 and all(changed.count(ops) == 1 for ops in others)


def test_an_alternative_costs_what_its_tiles_are_estimated_to_cost_more() -> None:
    coarse, cut, found = groups()
    costs, watts = coarse.costs.ops, coarse.costs.device.static_watts
    for group, ops, counts in zip(found.groups, found.ops, found.counts, strict=True):
        for one, count in zip(group.alternatives[1:], counts[1:], strict=True):
            rewritten = cut.changed_all(count).applied(coarse.graph)
            new = tile_costs(coarse.graph, costs, rewritten)
            own = [r for r in rewritten.replacements if not ops.isdisjoint(r.old)]
            seconds = sum(new[i].seconds for r in own for i in r.new) - sum(costs[i].seconds for i in ops)
            joules = sum(new[i].joules for r in own for i in r.new) - sum(costs[i].joules for i in ops)
            assert one.seconds == pytest.approx(seconds) and one.joules == pytest.approx(joules + watts * seconds)


def test_what_exists_in_tiles_alone_is_saved_but_for_one_of_them() -> None:
    coarse, cut, found = groups()
    graph, hanging = coarse.graph, 0
    for group, ops, counts in zip(found.groups, found.ops, found.counts, strict=True):
        for one, count in zip(group.alternatives[1:], counts[1:], strict=True):
            whole = cut.changed_all(count).applied(graph).graph.uses
            assert one.savings
            for saving in one.savings:
                s = coarse.storages[saving.tensor]
                assert not whole[s] and not ops.isdisjoint(graph.uses[s])
                assert saving.nbytes == graph.storages[s].nbytes * (count - 1) // count
                hanging += bool(saving.gaps)
    assert hanging, "what the forward pass leaves to the backward pass is in tiles only if it is not kept"


def test_what_is_filled_tile_by_tile_is_there_before_it_was() -> None:
    _, _, found = groups()
    held = [change.fixed_bytes for group in found.groups for one in group.alternatives for change in one.changes]
    assert max(held) > 0 and min(held) >= 0
