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
    with pytest.raises(ControlError, match="no agent is listening"):
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
            with pytest.raises(ControlError, match="ended in the middle of its answer; try again"):
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


def answers(root: Path, script: list[bytes | None]) -> tuple[threading.Thread, list[bytes]]:
    """Serve a request for each entry: with that body, or with nothing at all; what was asked is collected."""
    asked: list[bytes] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(root / "control.sock"))
    listener.listen()

    def serve() -> None:
        with listener:
            for body in script:
                connection = listener.accept()[0]
                with connection, connection.makefile("rb") as stream:
                    head = stream.readline()
                    length = 0
                    while line := stream.readline().strip():
                        if line.lower().startswith(b"content-length:"):
                            length = int(line.partition(b":")[2])
                    asked.append(head.split()[1] + b" " + stream.read(length))
                    if body is not None:
                        status, content = body.split(b" ", 1)
                        connection.sendall(
                            b"HTTP/1.1 %s X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content)
                        )

    server = threading.Thread(target=serve)
    server.start()
    return server, asked


def test_a_job_that_no_answer_came_for_is_asked_for_again_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "job.port").write_bytes(b"bundle")
    script = [b"200 {}", b'201 {"upload": "u"}', None, None, b'200 {"id": 1}']
    server, asked = answers(tmp_path, script)
    assert ControlClient(tmp_path).submit(tmp_path / "job.port", name="birds") == {"id": 1}
    server.join()
    paths = [line.split(b" ")[0] for line in asked]
    assert paths == [b"/v1/submissions/check", b"/v1/uploads", *[b"/v1/jobs"] * 3]
    assert b'"bytes": 6' in asked[0] and asked[2] == asked[3] == asked[4] and b'"submission": "' in asked[2]


def test_a_refusal_comes_before_the_bundle_goes_over(tmp_path: Path) -> None:
    (tmp_path / "job.port").write_bytes(b"bundle")
    server, asked = answers(tmp_path, [b'409 {"error": "job 3 (birds) has this name"}'])
    with pytest.raises(ControlError, match="has this name"):
        ControlClient(tmp_path).submit(tmp_path / "job.port", name="birds")
    server.join()
    assert len(asked) == 1
