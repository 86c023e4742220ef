"""Which media take packed pages."""

from dataclasses import replace

import torch

from port_agent.prepare.making import device_costs
from port_agent.prepare.making.packed_pages import with_packed_pages
from port_planner.ir.costs import DeviceCosts, Flash


def test_pages_are_packed_where_the_medium_is_slow_enough_for_that_to_save_time() -> None:
    flash = Flash("flash", 5e9, 5e9, 1e-4, 3e-9, 3e-9, 1e12, 1e-6)
    weights = [0.02 * torch.randn(1 << 19), torch.zeros(10)]
    fast = DeviceCosts("here", 0, 2.0, 4.0, flash)
    assert with_packed_pages(fast, weights) == fast, "an SSD takes pages faster than a core packs them"
    card = device_costs.slower_flash(fast, 10e6, 5e6)
    slow = with_packed_pages(replace(card, scratch_targets=(flash,)), weights)
    assert slow.flash.packs_pages and not slow.scratch_targets[0].packs_pages
    for then, now in ((10e6, slow.flash.read_bytes_per_s), (5e6, slow.flash.write_bytes_per_s)):
        assert 1.05 * then < now < 1.25 * then
    assert slow.flash.wear_joules_per_byte < 0.9e-6
    assert slow.flash.endurance_bytes is not None and slow.flash.endurance_bytes > 1.1e12
    assert with_packed_pages(card, weights[1:]) == card, "nothing to measure it on"
