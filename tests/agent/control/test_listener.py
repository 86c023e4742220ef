"""A listener under more connections than it takes, and under no descriptors."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from port_agent.control.http import HttpRequest, HttpResponse, json_response
from port_agent.control.listener import Listener

GET = b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"


def bound(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    return sock


def run(
    path: Path,
    most: int,
    test: Callable[[], Awaitable[None]],
    handler: Callable[[HttpRequest], Awaitable[HttpResponse]],
) -> None:
    async def serve() -> None:
        listener = Listener(bound(path), handler, lambda writer: "", most=most)
        try:
            await asyncio.wait_for(test(), 60.0)
        finally:
            listener.close()

    asyncio.run(serve())


async def answer(request: HttpRequest) -> HttpResponse:
    return json_response({"path": request.path})


async def ask(path: Path) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(GET)
    said = await reader.read()
    writer.close()
    return said


def test_who_waits_longest_gives_way(tmp_path: Path) -> None:
    path = tmp_path / "socket"

    async def test() -> None:
        silent = [await asyncio.open_unix_connection(str(path)) for _ in range(10)]
        assert (await ask(path)).startswith(b"HTTP/1.1 200")
        for reader, _ in silent[:7]:  # three more fit beside the one that asked
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        silent[-1][1].write(GET)
        assert (await silent[-1][0].read()).startswith(b"HTTP/1.1 200")

    run(path, 4, test, answer)


def test_who_is_being_answered_is_not_sent_away(tmp_path: Path) -> None:
    path, go_on = tmp_path / "socket", asyncio.Event()
    began = asyncio.Semaphore(0)

    async def slow(request: HttpRequest) -> HttpResponse:
        began.release()
        await go_on.wait()
        return json_response({})

    async def test() -> None:
        asked = [asyncio.create_task(ask(path)) for _ in range(3)]
        for _ in asked:
            await began.acquire()
        with contextlib.suppress(ConnectionError):
            assert await ask(path) == b""  # turned away
        go_on.set()
        assert all(said.startswith(b"HTTP/1.1 200") for said in await asyncio.gather(*asked))
        assert (await ask(path)).startswith(b"HTTP/1.1 200")

    run(path, 3, test, slow)


def test_a_question_is_answered_while_there_are_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "socket"
    monkeypatch.setattr("port_agent.control.listener._RETRY_S", 0.0)

    async def test() -> None:
        clients = [socket.socket(socket.AF_UNIX) for _ in range(4)]  # all that are left belong to somebody else
        taken = []
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for client in clients:  # the second finds the first still waiting, and takes its descriptor
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, str(path))
        last = clients[-1]
        await asyncio.get_running_loop().sock_sendall(last, GET)
        said = await asyncio.get_running_loop().sock_recv(last, 1000)
        for descriptor in taken:
            os.close(descriptor)
        for client in clients:
            client.close()
        assert said.startswith(b"HTTP/1.1 200")
        assert (await ask(path)).startswith(b"HTTP/1.1 200")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        run(path, 4, test, answer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closing_lets_go_of_everything(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    before = len(list(Path("/dev/fd").iterdir()))

    async def test() -> None:
        reader, writer = await asyncio.open_unix_connection(str(path))
        assert (await ask(path)).startswith(b"HTTP/1.1 200")
        writer.close()
        await reader.read()

    for number in range(3):
        path = tmp_path / f"socket{number}"
        run(path, 4, test, answer)
    assert len(list(Path("/dev/fd").iterdir())) == before
