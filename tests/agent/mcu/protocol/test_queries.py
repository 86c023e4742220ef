"""What replies to queries tell; their bytes are in `test_messages`."""

from port_agent.mcu.protocol.queries import Hello, Status
from tests.agent.mcu.examples import CASES


def test_figures_a_board_cannot_give_are_none() -> None:
    status = Status().read_reply({case[0]: case[2] for case in CASES}["status"])
    assert status.stack_bytes is None and status.stack_used_bytes == 476
    assert status.ram_used_bytes == 1424 + 476
    assert status.frame_errors == 2 + 3 + 4


def test_names_are_read_without_padding() -> None:
    info = Hello(0).read_reply({case[0]: case[2] for case in CASES}["hello"])
    assert (info.board, info.model, info.firmware_version, info.serial_text) == (
        "qemu-m4f",
        "small",
        "0.1.3",
        "0102030405060708",
    )
