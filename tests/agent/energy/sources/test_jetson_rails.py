"""Which rails make a Jetson's total, and that others make none."""

import pytest

from port_agent.energy.sources.jetson_rails import GPU_RAILS, SUMS, TOTAL_RAILS, board_total, gpu_rail
from port_agent.energy.sources.power_source import Coverage, SourceError

RAILS = {
    "TX2": ("VDD_IN", "VDD_SYS_GPU", "VDD_SYS_CPU", "VDD_SYS_SOC"),
    "Nano": ("POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU"),
    "Orin Nano": ("VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC"),
    "Thor": ("VIN", "VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"),
}
"""Rails as boards name them (NVIDIA's developer guides; Thor: jetson_stats, issue 711), the board's
input first, the GPU's second.
"""


@pytest.mark.parametrize("board", RAILS)
def test_the_input_of_a_board_is_its_total_and_a_part_of_that_its_gpu(board: str) -> None:
    total = board_total("tegrastats", {name: float(9 - i) for i, name in enumerate(RAILS[board])})
    assert (total.rails, total.watts, total.gpu_watts) == (RAILS[board][:1], 9.0, 8.0)
    assert total.gpu is not None and total.gpu.name == RAILS[board][1]


@pytest.mark.parametrize("rail", TOTAL_RAILS)
def test_an_input_rail_is_the_total_whatever_else_is_measured(rail: str) -> None:
    """The others lie behind it; added up they would count twice."""
    total = board_total("ina3221", {"VDD_CPU_GPU_CV": 2.0, rail: 5.0, **dict.fromkeys(SUMS[0], 9.0)})
    assert (total.watts, total.rails, total.coverage) == (5.0, (rail,), Coverage.BOARD)
    assert total.covers.startswith(f"whole board ({rail}); VDD_GPU_SOC of it feeds the GPU with ")
    assert board_total("ina3221", {rail: 5.0}).covers == f"whole board ({rail})"


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


@pytest.mark.parametrize("rail", GPU_RAILS)
def test_the_rail_that_feeds_the_gpu_is_found_among_others(rail: str) -> None:
    found = gpu_rail(("VDD_SOC", rail, "VIN_SYS_5V0"))
    assert found is not None and found.name == rail and "the GPU" in found.feeds
    assert found.reads(1.5).startswith(f"of it 1.50 W on {rail}, ")
    assert gpu_rail(("VDD_IN", "VDD_CPU_CV", "CPU")) is None
