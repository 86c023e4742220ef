"""What the client says where no agent answers."""

import contextlib
import socket
import sys
import time
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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse where the queue is full")
def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(tmp_path / "control.sock"))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = held.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(str(tmp_path / "control.sock"))
        began_s = time.monotonic()
        with pytest.raises(ControlError, match="does not answer"):
            ControlClient(tmp_path, timeout_s=0.3).get("/v1/status")
        assert time.monotonic() - began_s > 0.25
