"""The line between a worker and who started it: JSON lines both ways over one end of a socket pair.

Torch-free: both sides use it. Events go up, commands come down; every message carries the version.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

VERSION = 1
MAX_LINE_BYTES = 1 << 20
"""Longer than any message; a peer that sends more without a newline is broken."""


class Channel:
    """One end of the line."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; a peer that is gone is not an error here, the reading side sees it."""
        data = json.dumps({"v": VERSION, **message}, allow_nan=True).encode() + b"\n"
        with self._lock:
            try:
                self._socket.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                return

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield messages until the peer closes; lines that are no messages of this version are skipped."""
        buffer = b""
        while True:
            try:
                data = self._socket.recv(65536)
            except (ConnectionResetError, OSError):
                return
            if not data:
                return
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            if len(buffer) > MAX_LINE_BYTES:
                return
            for line in lines:
                message = _parse(line)
                if message is not None:
                    yield message

    def listen(self, handle: Callable[[dict[str, Any]], None], gone: Callable[[], None]) -> threading.Thread:
        """Call `handle` for each message in a thread of its own, `gone` when the peer has closed."""

        def run() -> None:
            for message in self.messages():
                handle(message)
            gone()

        thread = threading.Thread(target=run, name="control", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self._socket.close()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and message.get("v") == VERSION else None
