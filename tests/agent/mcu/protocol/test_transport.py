"""A serial port has one reader."""

from pathlib import Path

import pytest

from port_agent.mcu.board.board_errors import (
    DisconnectedError,
)
from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.session import Session
from port_agent.mcu.protocol.transport import SerialTransport
from tests.agent.mcu.proxy import FaultyLine
from tests.agent.mcu.simulated_board import QUICK

pytestmark = pytest.mark.process


def test_a_port_has_one_reader(simulator: Simulator, device: Device, tmp_path: Path) -> None:
    # two readers of one pty steal each other's bytes, and pyserial takes the theft for an unplugged board
    with pytest.raises(DisconnectedError, match="another program uses it"):
        SerialTransport(str(simulator.port))
    with pytest.raises(BlockingIOError), FaultyLine(simulator.port, tmp_path / "line"):
        pass
    device.session.close()
    with FaultyLine(simulator.port, tmp_path / "line") as line:
        with pytest.raises(DisconnectedError, match="another program uses it"):
            SerialTransport(str(simulator.port))
        through = Session(SerialTransport(str(line.port)), QUICK)
        assert through.info.nonce == device.info.nonce
        through.close()
