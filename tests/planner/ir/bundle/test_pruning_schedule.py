"""The schedule of pruning: from nothing to its share, in steps, and refused where it is none."""

import pytest

from port_planner.base.errors import PortError
from port_planner.ir.bundle.pruning_schedule import Pruning


def test_the_share_grows_to_what_was_asked_for_and_stays() -> None:
    pruning = Pruning(0.8, end=100, begin=20, every=10)
    shares = [pruning.sparsity_at(update) for update in range(121)]
    assert shares == sorted(shares) and shares[20] == 0 and shares[100] == shares[120] == pytest.approx(0.8)
    assert shares[60] > 0.8 / 2, "most goes early, while the rest can still make up for it"
    assert [u for u in range(121) if pruning.looks(u)] == list(range(30, 101, 10))
    assert Pruning(0.5, end=7, every=5).looks(7), "the last time is the end, whatever the steps"


@pytest.mark.parametrize("wrong", [(0.0, 5), (1.0, 5), (0.5, 0), (0.5, 5, 5), (0.5, 5, -1), (0.5, 5, 0, 0)])
def test_a_schedule_that_is_none_is_refused(wrong: tuple[float, int]) -> None:
    with pytest.raises(PortError, match="pruning"):
        Pruning(*wrong)
