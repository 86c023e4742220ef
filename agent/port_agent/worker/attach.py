"""How a user's program becomes a worker.

It asks on the daemon's control socket, which then becomes its connection. Does not import torch.

`POST /v1/attach` with a JSON object, answered by `101 Switching Protocols`; from there on both sides
speak `port_agent.worker.protocol`. It uses no HTTP library, because it is loaded into the user's process,
inside its memory budget.
"""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from port_planner.base.errors import ExitCode, PortError

ATTACH_PATH = "/v1/attach"
UPGRADE = "port-agent-worker"
JOB_HEADER = "Port-Agent-Job"
_HEAD_LIMIT_BYTES = 4096
_ANSWER_TIMEOUT_S = 30.0
"""Seconds to wait for an answer. The daemon writes to disk before it answers, and an SD card can take a second."""


class AttachError(PortError):
    """The daemon rejects the program, or is not running (`status` is then None)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        self.exit_code = ExitCode.UNREACHABLE if status is None else ExitCode.IMPOSSIBLE
        super().__init__(message)


class Refusal(msgspec.Struct, frozen=True):
    """The daemon's answer, with a status of 400 or above, to a request that it does not carry out."""

    error: str


class AttachRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A program's description of itself. `job`: the number that it had before the connection to the daemon was lost."""

    name: str
    ram_bytes: Annotated[int, msgspec.Meta(gt=0)]
    pid: Annotated[int, msgspec.Meta(gt=0)]
    step: Annotated[int, msgspec.Meta(ge=0)] = 0
    job: int | None = None


@dataclass(frozen=True, slots=True)
class AttachedLine:
    """The connection to the daemon, and the job's number and name there."""

    line: socket.socket
    job: int
    name: str


def read_request(content: bytes) -> AttachRequest:
    """Return a program's description of itself; raises AttachError."""
    try:
        return msgspec.json.decode(content, type=AttachRequest)
    except msgspec.DecodeError as error:
        raise AttachError(f"this request cannot attach a program: {error}", 400) from error


def attach(path: Path, request: AttachRequest) -> AttachedLine:
    """Attach this process to the daemon whose control socket is `path`; raises AttachError."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(_ANSWER_TIMEOUT_S)
        line.connect(str(path))
        body = msgspec.json.encode(request)
        head = (
            f"POST {ATTACH_PATH} HTTP/1.1",
            "Host: localhost",
            "Connection: Upgrade",
            f"Upgrade: {UPGRADE}",
            f"Content-Length: {len(body)}",
            "",
            "",
        )
        line.sendall("\r\n".join(head).encode() + body)
        status, headers = _read_head(line)
        if status != 101:
            raise AttachError(_refusal(line, headers), status)
        line.settimeout(None)
        number, _, name = headers[JOB_HEADER.lower()].partition(" ")
        return AttachedLine(line, int(number), name)
    except (OSError, ValueError, KeyError) as error:
        line.close()
        raise AttachError(f"the agent at {path} cannot be reached: {error}") from error
    except AttachError:
        line.close()
        raise


def _read_head(line: socket.socket) -> tuple[int, dict[str, str]]:
    """Return status and headers, read byte by byte, because what follows them belongs to the protocol."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = line.recv(1)
        if not byte or len(head) >= _HEAD_LIMIT_BYTES:
            raise ConnectionResetError(f"the agent closed the connection after {len(head)} bytes of its answer")
        head += byte
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, colon, value in (text.partition(":") for text in lines) if colon}
    return int(first.split(" ")[1]), headers


def _refusal(line: socket.socket, headers: dict[str, str]) -> str:
    wanted, content = int(headers.get("content-length", "0")), b""
    while len(content) < wanted and (chunk := line.recv(wanted - len(content))):
        content += chunk
    return msgspec.json.decode(content, type=Refusal).error
