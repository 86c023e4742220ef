"""The client of the control socket, used by the command line."""

import http.client
import json
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from port_agent.control import PATIENCE_S
from port_agent.control.http import SOCKET_NAME
from port_agent.worker.attach import Refusal
from port_planner.base.errors import ExitCode, PortError

DEFAULT_RUNTIME_DIR = Path("/run/port-agent")
_CHUNK_BYTES = 1 << 16
_SUBMITTED_AGAIN = 2
"""Number of times that a submission without an answer is repeated."""


class ControlError(PortError):
    """The daemon cannot be reached, or it rejected the request; `status` is its HTTP status, None without an answer."""

    def __init__(self, message: str, status: int | None = None, *, is_absent: bool = False) -> None:
        """`is_absent`: no agent is listening, as also happens while it is being restarted."""
        self.status, self.is_absent = status, is_absent
        refused = status is not None and 400 <= status < 500  # nothing is wrong with the agent
        self.exit_code = ExitCode.UNREACHABLE if status is None else ExitCode.IMPOSSIBLE if refused else ExitCode.FAILED
        super().__init__(message)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float | None) -> None:
        super().__init__("localhost")
        self._path, self._timeout_s = path, timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if (
            self._timeout_s is not None
        ):  # Python's own timeout fails at once while the kernel's queue is full: this one waits
            whole_s, part_s = divmod(self._timeout_s, 1.0)
            limit = struct.pack("ll", int(whole_s), int(part_s * 1e6))
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.sock.connect(str(self._path))
        self.sock.settimeout(self._timeout_s)


class ControlClient:
    """Client of the daemon whose socket is in `runtime_dir`."""

    def __init__(self, runtime_dir: Path = DEFAULT_RUNTIME_DIR, timeout_s: float = PATIENCE_S) -> None:
        self.path = runtime_dir / SOCKET_NAME
        self._timeout_s = timeout_s

    def get(self, path: str) -> Any:
        """Return the JSON at `path`."""
        return self._json("GET", path, None)

    def post(self, path: str, **fields: object) -> Any:
        """Send a JSON request and return the JSON answer."""
        return self._json("POST", path, json.dumps(fields).encode())

    def send(self, method: str, path: str, content: bytes | None) -> Any:
        """Send bytes and return the JSON answer."""
        return self._json(method, path, content)

    def text(self, path: str) -> str:
        """Return a text answer such as the metrics."""
        return self._whole(self._answer("GET", path, None)).decode()

    def submit(self, bundle: Path | None, /, **fields: object) -> Any:
        """Return the submitted job, from a bundle or from `fields` alone.

        The agent first checks what it can without the bundle. If no answer comes in time, the request is repeated once
        and still makes one job.
        """
        wanted = {**fields, "submission": secrets.token_hex(16)}
        if bundle is not None:
            self.post("/v1/submissions/check", **wanted, bytes=bundle.stat().st_size)
            wanted["upload"] = self.upload("/v1/uploads", bundle)["upload"]
        for _ in range(_SUBMITTED_AGAIN):
            try:
                return self.post("/v1/jobs", **wanted)
            except ControlError as error:
                if error.status is not None or error.is_absent:
                    raise
        return self.post("/v1/jobs", **wanted)

    def upload(self, path: str, file: Path) -> Any:
        """Send a file and return the JSON answer."""
        size = file.stat().st_size
        with file.open("rb") as body:
            answer = self._answer("PUT", path, body, {"Content-Length": str(size)})
        return json.loads(self._whole(answer))

    def download(self, path: str, file: Path) -> int:
        """Write the answer to `file` and return its bytes."""
        answer = self._answer("GET", path, None)
        with file.open("wb") as out:
            for chunk in self._chunks(answer.read):
                out.write(chunk)
            return out.tell()

    def follow(self, path: str) -> Iterator[str]:
        """Yield chunks of text as they arrive, until the daemon ends the stream."""
        answer = self._answer("GET", path, None, forever=True)
        for chunk in self._chunks(answer.read1):
            yield chunk.decode("utf-8", "replace")

    def _json(self, method: str, path: str, body: bytes | None) -> Any:
        return json.loads(self._whole(self._answer(method, path, body)))

    def _whole(self, answer: http.client.HTTPResponse) -> bytes:
        return b"".join(self._chunks(lambda _: answer.read()))

    def _chunks(self, read: Callable[[int], bytes]) -> Iterator[bytes]:
        """Yield what `read` returns; raises ControlError if the connection ends before the answer does."""
        while True:
            try:
                chunk = read(_CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise ControlError(f"the agent at {self.path} ended in the middle of its answer; try again") from error
            if not chunk:
                return
            yield chunk

    def _answer(
        self,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str] | None = None,
        *,
        forever: bool = False,
    ) -> http.client.HTTPResponse:
        connection = _UnixConnection(self.path, None if forever else self._timeout_s)
        try:
            connection.request(method, quote(path, safe="/?=&%"), body, headers or {})
            answer = connection.getresponse()
        except FileNotFoundError:
            reason = f"no agent is running: {self.path} does not exist; {_start_hint()}"
            raise ControlError(reason, is_absent=True) from None
        except ConnectionRefusedError:
            raise ControlError(f"no agent is listening at {self.path}; {_start_hint()}", is_absent=True) from None
        except PermissionError:
            raise ControlError(
                f"you may not use {self.path}; join its group (sudo usermod -aG port-agent $USER, then log in again) "
                "or use sudo"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise ControlError(f"the agent at {self.path} does not answer: {error}") from error
        if answer.status >= 400:
            raise ControlError(_message(answer), answer.status)
        return answer


def _message(answer: http.client.HTTPResponse) -> str:
    content = answer.read()
    try:
        return msgspec.json.decode(content, type=Refusal).error
    except ValueError:
        return f"the agent answered {answer.status} {answer.reason}"


def _start_hint() -> str:
    return (
        "start it with `systemctl start port-agent` or `port-agent run --foreground`; "
        "if it runs elsewhere, name its --runtime-dir"
    )
