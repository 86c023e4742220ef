"""Requests as no client writes them: each gets an answer that says what is wrong with it, or nothing but the end."""

import collections
import json
import random
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

from tests.attack.outcome import AttackOutcome

METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "get", "G\x00T", "", "GET GET", "\x1b[31mGET")
PATHS = (
    "/v1/status", "/v1/jobs", "/v1/jobs/1", "/v1/jobs/1/logs", "/v1/jobs/x/change", "/v1/inbox/x/y", "/v1/inbox/x/..",
    "/v1/inbox/x/%2e%2e%2f", "/v1/uploads", "/v1/pause", "/v1/resume", "/v1/energy", "/v1/peers", "/v1/health", "/metrics",
    "/", "*", "", "//", "http://[", "http://[::1/v1/status", "/v1/status\x00", "/\udcff".encode("utf-8", "surrogatepass").decode("latin-1"),
    "/%00", "/%ff%fe", "/v1/jobs/" + "a" * 5000, "/v1/jobs/%0d%0aX: y", "/v1/jobs/²", "/api/status", "/api/energy", "/static/x",
)  # fmt: skip
QUERIES = (
    "", "?", "?lines=²", "?lines=-1", "?lines=" + "9" * 5000, "?lines=1e3", "?follow=1&lines=%", "?since=nan", "?since=inf",
    "?since=-1e308", "?since=" + "9" * 400, "?until=nan&since=0", "?job=%00", "?all=1", "?by=x&by=y", "?step=0", "?" + "&" * 3000,
)  # fmt: skip
VERSIONS = (" HTTP/1.1", " HTTP/1.0", " HTTP/1.²", " HTTP/9.9", " HTTP/", "", " http/1.1", " HTTP/1.1 ")
LENGTHS = ("0", "2", "²", "٣", "-1", "+2", "1e3", "0x10", "9" * 30, "9" * 5000, "", " ", "2, 2", "1_0", "2\x00")
HEADERS = (
    "Host: localhost", "Host: 127.0.0.1", ":", ": x", "no colon", "X" * 300 + ": y", "Transfer-Encoding: chunked", "Connection: close",
    "Connection: \x00", "Expect: 100-continue", "X: \x1b]0;title\x07", "Authorization: Bearer ümlaut", "\ttab: x", "Upgrade: h2c",
)  # fmt: skip
WORST: tuple[Any, ...] = (
    "nan",
    10**400,
    -1,
    1e308,
    "²",
    "\udcff",
    "\x1b[2J",
    [],
    {},
    None,
    True,
    "a" * 3000,
    "../x",
    "/dev/null",
    "9" * 5000,
)
FIELDS = (
    "name", "data", "epochs", "steps", "checkpoint_every", "priority", "deadline_at", "waits_for_data", "kind", "upload", "bundle",
    "arguments", "v", "for_s", "flash", "x",
)  # fmt: skip
BODIES = (
    b"", b"{}", b"[]", b"null", b"NaN", b"{", b"{\"a\":", b"\xff\xfe", b"[" * 100_000, b"{\"a\":" * 50_000, b"{\"priority\": NaN}",
    b"{\"for_s\": Infinity}", b"{\"for_s\": 1e999}", b"\"\\ud800\"", b"{\"name\": \"\\ud800\"}", b"1" * 5000, b"\x00" * 64,
)  # fmt: skip
_GOOD = re.compile(rb"HTTP/1\.[01] (?:2\d\d|4\d\d|50[1357]) ")
"""501 and 505 are what Python's own server says to methods and versions that it does not know;
503 and 507 are the agent's.
"""


def odd_requests(seed: int, count: int, key: str) -> Iterator[bytes]:
    """Yield requests that are odd in some or all of line, headers and body; half of them bring the page's key."""
    choose = random.Random(seed)
    for _ in range(count):
        sane = choose.random() < 0.7
        method, version = ("POST", " HTTP/1.1") if sane else (choose.choice(METHODS), choose.choice(VERSIONS))
        if sane and choose.random() < 0.5:
            method = "GET"
        line = f"{method} {choose.choice(PATHS)}{choose.choice(QUERIES)}{version}"
        body = choose.choice(BODIES) if choose.random() < 0.5 else _fields(choose)
        length = str(len(body)) if choose.random() < 0.7 else choose.choice(LENGTHS)
        headers = [f"Content-Length: {length}", *choose.sample(HEADERS, choose.randrange(4))]
        if choose.random() < 0.5:
            headers += ["Host: localhost", f"Authorization: Bearer {key}"]
        choose.shuffle(headers)
        head = "\r\n".join([line, *headers, "", ""]).encode("utf-8", "surrogateescape")
        request = head + body
        if choose.random() < 0.15:
            request = _damaged(choose, request)
        yield request


def _fields(choose: random.Random) -> bytes:
    named = {name: choose.choice(WORST) for name in choose.sample(FIELDS, choose.randrange(1, 5))}
    if choose.random() < 0.5:
        named |= {"name": "x", "bundle": "/dev/null"}
        named[choose.choice(FIELDS)] = choose.choice(WORST)
    return json.dumps(named).encode()


def _damaged(choose: random.Random, request: bytes) -> bytes:
    content = bytearray(request)
    for _ in range(choose.randrange(1, 8)):
        where = choose.randrange(len(content))
        match choose.randrange(3):
            case 0:
                content[where] = choose.randrange(256)
            case 1:
                del content[where : where + choose.randrange(1, 20)]
            case 2:
                content[where:where] = choose.randbytes(choose.randrange(1, 20))
        content = content or bytearray(b"x")
    return bytes(content)


def attack_http(
    name: str, connect: Callable[[], socket.socket], *, count: int, seed: int = 1, key: str = ""
) -> AttackOutcome:
    """Send each request on a connection of its own and read what comes; only the server's log tells of tracebacks."""
    endings: collections.Counter[str] = collections.Counter()
    harmed = []
    for request in odd_requests(seed, count, key):
        answer = _converse(connect, request)
        if answer is None:
            harmed.append(f"no end: {request[:200]!r}")
            continue
        endings[answer[9:12].decode("latin-1") or "closed"] += 1
        if answer and not _GOOD.match(answer):
            harmed.append(f"{answer[:80]!r} to {request[:200]!r}")
    notes = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
    return AttackOutcome(name, count, count - len(harmed), tuple(harmed), notes)


def _converse(connect: Callable[[], socket.socket], request: bytes) -> bytes | None:
    """Return what a server says to a request, nothing where it only closes, None where it does neither."""
    with connect() as sock:
        try:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            chunks = []
            while chunk := sock.recv(1 << 16):
                chunks.append(chunk)
        except TimeoutError:
            return None
        except OSError:  # closed before all was sent, which is its right
            return b""
    return b"".join(chunks)
