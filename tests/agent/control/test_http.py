"""The control socket: HTTP as it should and should not come, whole, in chunks, glued, and from whom."""

import asyncio
import json
import math
import os
import socket
from typing import Any

import pytest

from port_agent.control.http import (
    HttpError,
    HttpRequest,
    HttpResponse,
    SocketPeer,
    json_response,
    peer_of,
    serve_connection,
)


async def echo(request: HttpRequest) -> HttpResponse:
    if request.path == "/fail":
        raise HttpError(409, "it is as it is")
    if request.path == "/stream":
        return HttpResponse(200, b"", "text/plain", chunks())
    if request.path == "/take":
        return HttpResponse(101, headers={"Connection": "Upgrade"}, takes_over=shout)
    if request.path == "/ignore":
        return json_response({})
    fields = await request.json()
    return json_response({"method": request.method, "path": request.path, "query": dict(request.query), **fields})


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write((await reader.read()).upper())


async def chunks() -> Any:
    for chunk in (b"one ", b"", b"two"):
        yield chunk


def converse(data: bytes, step: int | None = None, refused: str = "") -> bytes:
    """Return everything the server answers to `data`, sent whole or in chunks of `step` bytes."""

    waits: list[bool] = []

    async def run() -> bytes:
        ours, theirs = socket.socketpair()
        server_reader, server_writer = await asyncio.open_unix_connection(sock=theirs)
        task = asyncio.create_task(
            serve_connection(server_reader, server_writer, echo, lambda _: refused, waits.append)
        )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        size = step or len(data) or 1
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
        writer.write_eof()
        answer = await reader.read()
        await task
        writer.close()
        return answer

    return asyncio.run(asyncio.wait_for(run(), 20.0))


GET = b"GET /a%20b?x=1&y= HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b'POST /p HTTP/1.1\r\nContent-Length: 7\r\n\r\n{"a":1}'


@pytest.mark.parametrize("step", [None, 1, 7])
def test_requests_whole_in_chunks_and_glued(step: int | None) -> None:
    answer = converse(GET + POST + GET, step)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert b'"path":"/a b","query":{"x":"1","y":""}' in answer
    assert b'"path":"/p","query":{},"a":1' in answer
    assert answer.count(b"Port-Agent-Api: 1") == 3


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"nonsense\r\n\r\n", 400, b"not a valid HTTP/1.1 request"),
        (b"GET / SPDY/3\r\n\r\n", 400, b"not a valid HTTP/1.1 request"),
        (b"GET / HTTP/1.1\r\nContent-Length: many\r\n\r\n", 400, b"is not a valid number"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, b"Content-Length"),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n{bad}", 400, b"not valid JSON"),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]", 400, b"not a valid JSON object"),
        (b"POST / HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n" + b" " * 9999999, 413, b"bytes of JSON"),
        (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n", 413, b"bytes of headers"),
        (b"GET / HTTP/1.1\r\nHost", 400, b"ends inside its headers"),
        (b"GET /fail HTTP/1.1\r\n\r\n", 409, b"it is as it is"),
    ],
)
def test_bad_requests_are_answered(data: bytes, status: int, words: bytes) -> None:
    answer = converse(data)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert words in answer


def test_a_body_that_nobody_reads_does_not_hide_the_answer() -> None:
    body = b"x" * 300_000
    request = b"POST /ignore HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert converse(request + body + GET).count(b"HTTP/1.1 200 OK") == 2


def test_a_torn_body_gets_no_answer_and_breaks_nothing() -> None:
    assert converse(b"POST /ignore HTTP/1.1\r\nContent-Length: 100\r\n\r\nshort") == b""


def test_streams_and_close() -> None:
    answer = converse(b"GET /stream HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in answer
    assert answer.endswith(b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n")


def test_strangers_are_refused() -> None:
    assert converse(GET, refused="user 4711 is not in the group").startswith(b"HTTP/1.1 403 ")


def test_the_kernel_says_who_connected() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_of(theirs) == SocketPeer(os.geteuid(), os.getegid(), os.getpid())


def test_a_connection_that_is_taken_over_speaks_no_http_any_more() -> None:
    answer = converse(b"POST /take HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}now this GET")
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n") and b"Connection: Upgrade" in head
    assert b"Content-Length" not in head and b"chunked" not in head
    assert rest == b"NOW THIS GET"


def test_a_number_that_is_not_finite_is_null_in_an_answer() -> None:
    assert json.loads(json_response({"loss": math.nan, "figures": [math.inf, 1.5]}).content) == {
        "loss": None,
        "figures": [None, 1.5],
    }
