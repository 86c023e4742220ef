"""Which rails make a Jetson's total, and that others make none."""

import pytest

from agent.energy.sources.base import Coverage, SourceError
from agent.energy.sources.jetson_rails import SUMS, TOTAL_RAILS, board_total


@pytest.mark.parametrize("rail", TOTAL_RAILS)
def test_an_input_rail_is_the_total_whatever_else_is_measured(rail: str) -> None:
    """The others lie behind it; added up they would count twice."""
    total = board_total("ina3221", {"VDD_CPU_GPU_CV": 2.0, rail: 5.0, **dict.fromkeys(SUMS[0], 9.0)})
    assert (total.watts, total.rails, total.coverage) == (5.0, (rail,), Coverage.BOARD)
    assert total.covers == f"whole board ({rail})"


@pytest.mark.parametrize("rails", SUMS)
def test_without_one_the_rails_that_together_feed_the_board_are_added_and_nothing_else(rails: tuple[str, ...]) -> None:
    watts = {name: float(2**i) for i, name in enumerate(rails)}
    total = board_total("tegrastats", watts | {"VDDQ_VDD2_1V8AO": 100.0})
    assert (total.watts, total.rails, total.coverage) == (2.0 ** len(rails) - 1, rails, Coverage.RAIL_SUM)
    assert "all but the carrier board" in total.covers and all(name in total.covers for name in rails)


@pytest.mark.parametrize("rails", SUMS)
def test_a_sum_with_a_rail_missing_is_no_total(rails: tuple[str, ...]) -> None:
    for missing in rails:
        with pytest.raises(SourceError, match="do not make a known total; report the board and these rails") as caught:
            board_total("ina3221", {name: 1.0 for name in rails if name != missing})
        assert caught.value.source == "ina3221"
    with pytest.raises(SourceError, match="rails none do not make"):
        board_total("ina3221", {})
