"""The table of boards is consistent."""

import pytest

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.board.catalogue import BOARDS, find_board


def test_board_table_is_consistent() -> None:
    assert len({board.name for board in BOARDS}) == len(BOARDS)
    for board in BOARDS:
        assert len(board.name) <= 23  # the field in HELLO
        assert board.ring_bytes & (board.ring_bytes - 1) == 0
        assert board.uart_interrupt < board.interrupts
        assert find_board(board.name) is board
    with pytest.raises(BoardJobError, match="qemu-m4f"):
        find_board("unknown")
