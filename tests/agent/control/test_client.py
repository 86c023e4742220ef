"""What the client says where no agent answers."""

import contextlib
import socket
import sys
import threading
from pathlib import Path

import pytest

from port_agent.control.client import ControlClient, ControlError


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
        with pytest.raises(ControlError, match="does not answer"):
            ControlClient(tmp_path, timeout_s=0.3).get("/v1/status")


@pytest.mark.parametrize("head", ["Transfer-Encoding: chunked\r\n\r\n40\r\n", "Content-Length: 64\r\n\r\n"])
def test_an_agent_that_ends_in_the_middle_of_its_answer(tmp_path: Path, head: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control.sock"))
        listener.listen()

        def answer_in_part() -> None:
            for _ in range(2):
                connection = listener.accept()[0]
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(f"HTTP/1.1 200 OK\r\n{head}".encode() + b"half of it")

        agent = threading.Thread(target=answer_in_part)
        agent.start()
        client = ControlClient(tmp_path)
        for ask in (lambda: client.get("/v1/status"), lambda: client.text("/v1/jobs/1/logs")):
            with pytest.raises(ControlError, match="ended in the middle of its answer; ask again"):
                ask()
        agent.join()


def test_a_result_that_is_cut_is_said(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control.sock"))
        listener.listen()

        def answer_in_part() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n40\r\nof")

        agent = threading.Thread(target=answer_in_part)
        agent.start()
        with pytest.raises(ControlError, match="ended in the middle"):
            ControlClient(tmp_path).download("/v1/jobs/1/result", tmp_path / "out")
        agent.join()
