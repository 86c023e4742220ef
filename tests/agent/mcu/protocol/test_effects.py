"""What replies to effects must hold; their bytes are in `test_messages`."""

import pytest

from port_agent.mcu.board.board_errors import MessageError
from port_agent.mcu.protocol.effects import Infer, Options
from tests.agent.mcu.examples import TRAINING


def test_unknown_enums_inside_replies_are_refused() -> None:
    with pytest.raises(MessageError, match="OPTIONS"):
        Options().read_reply(TRAINING[:4] + b"\x09" + TRAINING[5:])
    with pytest.raises(MessageError, match="INFER did 1 of 2"):
        Infer(2, bytes(48)).read_reply(b"\x01\0\x01\0\x03\0")
