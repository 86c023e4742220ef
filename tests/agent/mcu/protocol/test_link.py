"""A link refuses a board that holds another model."""

from pathlib import Path

import pytest

from port_agent.mcu.board.board_errors import (
    IncompatibleError,
)
from port_agent.mcu.protocol.board_model import read_model
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.link import check_model
from tests.agent.mcu.small_model import write_model

pytestmark = pytest.mark.process


def test_wrong_model_is_refused_with_the_remedy(device: Device, tmp_path: Path) -> None:
    other = read_model(write_model(tmp_path / "other", name="other"))
    with pytest.raises(IncompatibleError, match="reflash with: port-agent mcu flash --board posix") as caught:
        check_model(device.info, other, "/dev/ttyX")
    assert "'small'" in str(caught.value) and "'other'" in str(caught.value)
