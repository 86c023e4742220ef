"""Finding a board: by USB identity and serial number, by path, again after a replug."""

from pathlib import Path

import pytest

from port_agent.mcu.board.board_errors import PortNotFoundError
from port_agent.mcu.board.catalogue import UsbId, boards_with_usb
from port_agent.mcu.protocol.ports import PortInfo, PortSelector, find_port, require_port, selector_of

MICROBIT = UsbId(0x0D28, 0x0204)


def port(path: str, serial: str | None = "A1", usb: UsbId | None = MICROBIT) -> PortInfo:
    boards = boards_with_usb(usb.vendor, usb.product) if usb else ()
    return PortInfo(path, usb, serial, "board", boards)


def test_board_is_found_again_under_another_name() -> None:
    selector = selector_of(port("/dev/ttyACM0"))
    assert selector == PortSelector(usb=MICROBIT, serial="A1")
    after = [port("/dev/ttyACM0", serial="OTHER"), port("/dev/ttyACM1")]
    found = find_port(selector, lambda: after)
    assert found is not None and found.path == "/dev/ttyACM1"


def test_without_a_serial_number_the_path_has_to_do() -> None:
    assert selector_of(port("/dev/ttyACM0", serial=None)) == PortSelector(path="/dev/ttyACM0", usb=MICROBIT)


def test_the_only_known_board_is_the_default() -> None:
    unknown = PortInfo("/dev/ttyUSB0", UsbId(0x1A86, 0x7523), None, "adapter", ())
    found = find_port(PortSelector(), lambda: [unknown, port("/dev/ttyACM0")])
    assert found is not None and found.path == "/dev/ttyACM0"


def test_two_boards_ask_for_a_choice() -> None:
    with pytest.raises(PortNotFoundError, match=r"2 ports match.*--port"):
        find_port(PortSelector(), lambda: [port("/dev/ttyACM0"), port("/dev/ttyACM1", "B2")])


def test_nothing_plugged_in_names_the_simulator() -> None:
    with pytest.raises(PortNotFoundError, match="port-agent mcu simulate"):
        require_port(PortSelector(serial="A1"), lambda: [])


def test_given_path_needs_no_listing(tmp_path: Path) -> None:
    path = tmp_path / "pty"
    assert find_port(PortSelector(path=str(path)), lambda: []) is None
    path.touch()
    found = find_port(PortSelector(path=str(path)), lambda: [])
    assert found is not None and found.path == str(path)
