"""What a page costs: whole blocks are written, a core that waits pays for its time, boards
without figures are named.
"""

from __future__ import annotations

import pytest

from port_planner.ir.boards import BoardError
from port_planner.mcu.core_costs import core_costs
from port_planner.mcu.page_costs import MediumError, PageCosts, PageMedium, page_costs


def costs(medium: PageMedium, board: str = "nrf52840") -> PageCosts:
    return page_costs(board, medium, core_costs(board))


@pytest.mark.parametrize("board", ["nrf52840", "mkr1000"])
@pytest.mark.parametrize("medium", list(PageMedium))
def test_every_board_has_every_medium_and_writing_is_no_cheaper_than_reading(board: str, medium: PageMedium) -> None:
    trip = costs(medium, board).paging(4096)
    assert trip.seconds_out >= trip.seconds_in > 0 and trip.joules_out >= trip.joules_in > 0


def test_a_page_wears_whole_blocks() -> None:
    assert [costs(medium).written(100) for medium in PageMedium] == [100, 4096, 512]
    assert costs(PageMedium.NOR).paging(4).joules_out > 0.9 * costs(PageMedium.NOR).paging(4096).joules_out
    assert costs(PageMedium.NOR).endurance_cycles == 100_000 and costs(PageMedium.PSRAM).endurance_cycles is None


def test_a_core_that_waits_pays_for_the_transfer_too() -> None:
    found = costs(PageMedium.SD)
    trip = found.paging(10_000)
    waited = found.waited(10_000, trip.seconds_in, trip.joules_in)
    transfer = trip.seconds_in - 10_000 * found.core_seconds_per_byte
    assert waited - trip.joules_in == pytest.approx(transfer * core_costs("nrf52840").watts)


def test_only_mapped_memory_holds_parameters() -> None:
    assert [medium.holds_parameters for medium in PageMedium] == [True, False, False]


def test_a_board_without_figures_is_named() -> None:
    core = core_costs("nrf52840")
    with pytest.raises(MediumError, match="the board file of pi5 has no figures for nor; add nor_read_bytes_per_s"):
        page_costs("pi5", PageMedium.NOR, core)
    with pytest.raises(BoardError, match="unknown board"):
        page_costs("nothing", PageMedium.NOR, core)
