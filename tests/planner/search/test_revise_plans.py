"""Plans made again for what steps take: others where the proportions are, the same bits, never more memory or wear."""

import pytest

from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import PlanChoice
from port_planner.ir.bundle.revision import Revision, revised
from port_planner.ir.costs import Speeds
from port_planner.search.pareto import choice_of
from port_planner.search.revise_plans import at_speeds, in_proportion, revise
from tests.agent.jobs_small import small_bundle

SLOW_CARD = Speeds(1.0, 1e5, 1e5)


def of_small(speeds: Speeds, accumulate: int = 1) -> tuple[Bundle, Revision]:
    bundle = Bundle(small_bundle(accumulate))
    return bundle, revise(bundle, speeds, 1.0)


def test_costs_at_measured_speeds() -> None:
    bundle = Bundle(small_bundle())
    costs = bundle.costs["step"]
    slower = at_speeds(costs, Speeds(3.0, 5e6))
    assert [c.seconds for c in slower.ops] == pytest.approx([3 * c.seconds for c in costs.ops])
    assert [c.joules for c in slower.ops] == pytest.approx([3 * c.joules for c in costs.ops])
    assert slower.device.flash.read_bytes_per_s == 5e6
    assert slower.device.flash.write_bytes_per_s == costs.device.flash.write_bytes_per_s
    assert not in_proportion(costs, slower)
    flash = costs.device.flash
    all_slower = at_speeds(costs, Speeds(3.0, flash.read_bytes_per_s / 3, flash.write_bytes_per_s / 3.2))
    assert in_proportion(costs, all_slower)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_medium_that_turned_out_slow_is_used_less(accumulate: int) -> None:
    bundle, revision = of_small(SLOW_CARD, accumulate)
    old, new = bundle.manifest.plans[1], revision.choices[1]
    assert old.written_bytes > 0 and new.written_bytes < old.written_bytes
    assert new.peak_bytes <= old.ram_bytes
    assert new.joules < at(bundle, 1, revision).joules
    names = set(bundle.graphs)
    assert all(set(plans) == names for plans in revision.plans)
    assert revised(bundle, revision).manifest.plans == revision.choices


def at(bundle: Bundle, index: int, revision: Revision) -> PlanChoice:
    """Return the figures of the bundle's own plan at the speeds of a revision."""
    return choice_of(0, bundle.plans[index], bundle.graphs, revision.costs, bundle.manifest.accumulate)


def test_where_all_is_slower_the_plans_stay_and_their_figures_do_not() -> None:
    flash = Bundle(small_bundle()).costs["step"].device.flash
    bundle, revision = of_small(Speeds(2.0, flash.read_bytes_per_s / 2, flash.write_bytes_per_s / 2))
    for old, new in zip(bundle.plans, revision.plans, strict=True):
        assert {n: p.decisions for n, p in old.items()} == {n: p.decisions for n, p in new.items()}
    assert revision.choices[0].seconds == pytest.approx(2 * bundle.manifest.plans[0].seconds, rel=0.01)
