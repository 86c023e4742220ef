"""Becoming a worker over the control socket: what is refused, and daemons that answer something else."""

import socket
import threading
from pathlib import Path

import pytest

from port_agent.control.client import ControlError
from port_agent.worker.attach import AttachError, AttachRequest, attach
from tests.agent.live_daemon import daemon

REQUEST = AttachRequest(name="train", ram_bytes=1, pid=1)


@pytest.mark.process
def test_what_cannot_be_attached_is_refused(tmp_path: Path) -> None:
    with daemon(tmp_path) as client:
        for fields, words in (
            (b"{}", "missing required field"),
            (b'{"name": "Train!", "ram_bytes": 1, "pid": 1}', "job name"),
            (b'{"name": "a", "ram_bytes": "1", "pid": 1}', "ram_bytes"),
            (b'{"name": "a", "ram_bytes": 0, "pid": 1}', "ram_bytes"),
            (b'{"name": "a", "ram_bytes": 1, "pid": -1}', "pid"),
            (b'{"name": "a"' + b" " * (1 << 20) + b"}", "bytes of JSON"),
        ):
            with pytest.raises(ControlError, match=words):
                client._json("POST", "/v1/attach", fields)
        with pytest.raises(ControlError, match="no job kind"):
            client.post("/v1/jobs", name="x", kind="attached")
        with pytest.raises(AttachError, match="job name") as refused:
            attach(client.path, AttachRequest(name="Not a name", ram_bytes=1, pid=1))
        assert refused.value.status == 409
    with pytest.raises(AttachError, match="cannot be reached") as lost:
        attach(client.path, AttachRequest(name="train", ram_bytes=1, pid=1))
    assert lost.value.status is None


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 101",
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 403 Forbidden\r\nContent-Length: 90\r\n\r\n{",
        b"x" * 5000,
    ],
    ids=["nothing", "torn", "no HTTP", "not a valid number", "torn refusal", "no end"],
)
def test_a_strange_answer_is_an_unreachable_agent(tmp_path: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "control.sock"))
        server.listen()

        def serve() -> None:
            line, _ = server.accept()
            with line:
                line.recv(4096)
                line.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(AttachError, match="cannot be reached") as lost:
            attach(tmp_path / "control.sock", REQUEST)
        thread.join()
    assert lost.value.status is None


def test_what_follows_the_answer_is_not_read(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "control.sock"))
        server.listen()

        def serve() -> None:
            line, _ = server.accept()
            line.recv(4096)
            line.sendall(b"HTTP/1.1 101 Switching Protocols\r\nPort-Agent-Job: 7 train-2\r\n\r\n{first")

        thread = threading.Thread(target=serve)
        thread.start()
        attached = attach(tmp_path / "control.sock", REQUEST)
        thread.join()
    with attached.line as line:
        assert (attached.job, attached.name, line.recv(6)) == (7, "train-2", b"{first")
