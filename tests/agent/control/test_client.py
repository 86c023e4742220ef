"""What the client says where no agent answers."""

import socket
from pathlib import Path

import pytest

from agent.control.client import ControlClient, ControlError


def test_a_file_that_is_no_socket(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="no agent is running"):
        ControlClient(tmp_path).get("/v1/status")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "control.sock"))
    listener.close()
    with pytest.raises(ControlError, match="no agent listens"):
        ControlClient(tmp_path).get("/v1/status")
