"""A small HTTP/1.1 server on asyncio streams, with only what the control socket needs.

Measured against frameworks for this daemon: 32 MB of resident memory in total and no wake-ups of its own, while uvicorn
wakes ten times a second.
"""

import asyncio
import contextlib
import re
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from port_planner.base.errors import PortError

SOCKET_NAME = "control.sock"
HEADER_LIMIT_BYTES = 16384
"""Largest size of a request's headers. curl sends 100 bytes; the limit bounds what a faulty client can make us keep."""
JSON_LIMIT_BYTES = 1 << 20
"""Largest size in bytes of a request's JSON, which is a job description."""
IDLE_TIMEOUT_S = 60.0
_CHUNK_BYTES = 1 << 16
_LENGTH = "[0-9]{1,18}"
"""Pattern of a file's length in ASCII digits; Python's `int` also accepts other digits."""

_REASONS = {
    101: "Switching Protocols",
    200: "OK",
    201: "Created",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    507: "Insufficient Storage",
}


class HttpError(PortError):
    """A request is rejected; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


@dataclass(slots=True)
class HttpRequest:
    """One request; the body is read on demand."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    reader: asyncio.StreamReader
    length: int
    consumed: int = 0
    peer: "SocketPeer | None" = None
    """The client's user, for a connection over a Unix socket."""

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body in chunks; raises HttpError if it ends early or stalls."""
        while self.consumed < self.length:
            try:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    chunk = await self.reader.read(min(_CHUNK_BYTES, self.length - self.consumed))
            except TimeoutError as error:
                raise HttpError(408, f"no data came after {self.consumed} of {self.length} bytes") from error
            if not chunk:
                raise HttpError(400, f"the connection ended after {self.consumed} of {self.length} bytes")
            self.consumed += len(chunk)
            yield chunk

    async def json_text(self) -> bytes:
        """Return the JSON body of a request; raises HttpError if it is too long for a description."""
        if self.length > JSON_LIMIT_BYTES:
            raise HttpError(413, f"{self.length} bytes of JSON exceed the limit of {JSON_LIMIT_BYTES}")
        return b"".join([chunk async for chunk in self.body()])

    async def json(self) -> dict[str, object]:
        """Return the body as a JSON object, which is empty for an empty body; raises HttpError for anything else."""
        content = await self.json_text()
        try:
            return msgspec.json.decode(content or b"{}", type=dict[str, object])
        except msgspec.ValidationError as error:
            raise HttpError(400, f"the body is not a valid JSON object: {error}") from error
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is not valid JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One answer: a whole body, or a stream that is sent in chunks."""

    status: int = 200
    content: bytes = b""
    content_type: str = "application/json"
    stream: AsyncIterator[bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    takes_over: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None
    """Handler that takes over the connection, which then no longer speaks HTTP (status 101)."""


def json_response(value: object, status: int = 200) -> HttpResponse:
    """Return an answer with a JSON body; numbers that are not finite become null."""
    return HttpResponse(status, msgspec.json.encode(value) + b"\n")


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


@dataclass(frozen=True, slots=True)
class SocketPeer:
    """The process at the other end of a Unix socket, according to the kernel."""

    uid: int
    gid: int
    pid: int | None


def peer_of(sock: socket.socket) -> SocketPeer:
    """Return the credentials of the process that connected."""
    if sys.platform == "darwin":
        # struct xucred: version, uid, count of groups, 16 groups; option LOCAL_PEERCRED (1) of level SOL_LOCAL (0)
        raw = sock.getsockopt(0, 1, 4 + 4 + 4 + 16 * 4)
        _, uid, _, gid = struct.unpack_from("IIhxxI", raw)
        return SocketPeer(uid, gid, None)
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return SocketPeer(uid, gid, pid)


def _unix_peer(writer: asyncio.StreamWriter) -> SocketPeer | None:
    sock = writer.get_extra_info("socket")
    return peer_of(sock) if sock.family == socket.AF_UNIX else None


async def serve_connection(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    handler: Handler,
    refuse: Callable[[asyncio.StreamWriter], str],
    waits: Callable[[bool], None],
) -> None:
    """Answer the requests of one connection.

    `refuse` returns why the peer is rejected, or "". `waits` is called with True when the server begins to wait for the
    client, and with False when the client begins to wait for the server.
    """
    try:
        reason, peer = refuse(writer), _unix_peer(writer)
        while await _one_request(reader, writer, handler, reason, peer, waits):
            pass
    except (OSError, asyncio.IncompleteReadError):
        pass  # the client disconnected, which is its right
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _one_request(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    handler: Handler,
    refused: str,
    peer: SocketPeer | None,
    waits: Callable[[bool], None],
) -> bool:
    request = None
    waits(True)
    try:
        request = await _read_request(reader)
        if request is None:
            return False
        request.peer = peer
        waits(False)
        if refused:
            raise HttpError(403, refused)
        response = await handler(request)
    except HttpError as error:
        response = error_response(error.status, error)
    except PortError as error:
        response = error_response(409, error)
    if request is None:  # this was not a request, so it is unknown where the next one begins
        await _send(writer, response, keep=False)
        return False
    waits(True)
    await _discard_body(request)
    waits(False)
    keep = request.headers.get("connection", "").lower() != "close" and response.takes_over is None
    await _send(writer, response, keep=keep)
    if response.takes_over is not None:
        await response.takes_over(reader, writer)
    return keep


async def _discard_body(request: HttpRequest) -> None:
    """Read the rest of the body: if the socket closes while the client is still sending, the
    client never sees the answer.
    """
    async with asyncio.timeout(IDLE_TIMEOUT_S):
        try:
            async for _ in request.body():
                pass
        except HttpError as error:
            raise ConnectionResetError(str(error)) from error


def error_response(status: int, error: PortError) -> HttpResponse:
    """Return an error as JSON: its message and the name of its class."""
    return json_response({"error": str(error), "kind": type(error).__name__}, status)


async def _read_request(reader: asyncio.StreamReader) -> HttpRequest | None:
    try:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise HttpError(413, f"more than {HEADER_LIMIT_BYTES} bytes of headers") from error
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise HttpError(400, "the request ends inside its headers") from error
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise HttpError(400, f"not a valid HTTP/1.1 request: {first[:60]!r}")
    headers = {
        name.strip().lower(): value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon
    }
    if "transfer-encoding" in headers:
        raise HttpError(400, "send a Content-Length; chunked requests are not supported")
    length = headers.get("content-length", "0")
    if not re.fullmatch(_LENGTH, length):
        raise HttpError(400, f"Content-Length {length[:20]!r} is not a valid number of bytes")
    try:
        parts = urlsplit(words[1])
    except ValueError as error:
        raise HttpError(400, f"{words[1][:60]!r} is not a valid address: {error}") from error
    query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    return HttpRequest(words[0], unquote(parts.path), query, headers, reader, int(length))


async def _send(writer: asyncio.StreamWriter, response: HttpResponse, *, keep: bool) -> None:
    headers = {
        "Content-Type": response.content_type,
        "Port-Agent-Api": "1",
        "Connection": "keep-alive" if keep else "close",
        **response.headers,
    }
    if response.takes_over is None and response.stream is None:
        headers["Content-Length"] = str(len(response.content))
    elif response.stream is not None:
        headers["Transfer-Encoding"] = "chunked"
    lines = [f"HTTP/1.1 {response.status} {_REASONS.get(response.status, 'Status')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + response.content)
    if response.takes_over is not None:
        return  # the handler that takes over sees a closed connection
    await _drain(writer)
    if response.stream is not None:
        async for chunk in response.stream:
            if chunk:
                writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                await _drain(writer)
        writer.write(b"0\r\n\r\n")
        await _drain(writer)


async def _drain(writer: asyncio.StreamWriter) -> None:
    """Wait until the client has accepted what was written; raises TimeoutError if it accepts nothing."""
    async with asyncio.timeout(IDLE_TIMEOUT_S):
        await writer.drain()
