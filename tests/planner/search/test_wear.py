"""The price of wear: taken away, and put to a search in a part that it sees."""

import pytest

from port_planner.ir.costs import DeviceCosts, Flash
from port_planner.search.wear import WEAR_WEIGHT, costliest_wear, visible_share, with_wear

CARD, STICK = (
    Flash(name, 45e6, 25e6, 1e-4, 1e-8, 2e-8, None, wear) for name, wear in (("card", 5e-6), ("stick", 2e-6))
)
DEVICE = DeviceCosts("device", 0, 2.0, 4.0, CARD, scratch_targets=(STICK,))


def test_a_share_of_wear_is_charged_on_every_medium() -> None:
    assert [t.wear_joules_per_byte for t in with_wear(DEVICE, 0.5).targets] == pytest.approx([2.5e-6, 1e-6])
    assert costliest_wear(DEVICE) == 5e-6
    assert costliest_wear(with_wear(DEVICE, 0.0)) == 0.0


def test_writing_everything_is_worth_so_many_steps_and_never_more_than_its_price() -> None:
    share = visible_share(DEVICE, step_joules=10.0, storage_bytes=1 << 30)
    assert share * costliest_wear(DEVICE) * (1 << 30) == pytest.approx(WEAR_WEIGHT * 10.0)
    assert visible_share(DEVICE, step_joules=10.0, storage_bytes=1 << 10) == 1.0
