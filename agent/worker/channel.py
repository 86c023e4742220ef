"""The line between a worker and who started it, over one end of a socket pair: events up, commands down.

Torch-free: both sides use it. A message that this version does not know is skipped.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from agent.worker.protocol import (
    Command,
    Event,
    LineSplitter,
    ProtocolError,
    decode_command,
    decode_event,
    encode_message,
)


class Channel:
    """One end of the line."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()

    def send(self, message: Event | Command) -> None:
        """Send one message; a peer that is gone is not an error here, the reading side sees it."""
        data = encode_message(message)
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def events(self) -> Iterator[Event]:
        """Yield what the worker says until it closes the line."""
        for line in self._lines():
            try:
                event = decode_event(line)
            except ProtocolError:
                continue
            yield event

    def listen(self, handle: Callable[[Command], None], gone: Callable[[], None]) -> threading.Thread:
        """Call `handle` for each command in a thread of its own, `gone` when the supervisor has closed."""

        def run() -> None:
            for line in self._lines():
                try:
                    command = decode_command(line)
                except ProtocolError:
                    continue
                handle(command)
            gone()

        thread = threading.Thread(target=run, name="control", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Close our end."""
        self._socket.close()

    def _lines(self) -> Iterator[bytes]:
        """Yield lines until the peer closes or sends one that does not end."""
        splitter = LineSplitter()
        while True:
            try:
                data = self._socket.recv(65536)
                lines = splitter.feed(data)
            except (OSError, ProtocolError):
                return
            if not data:
                return
            yield from lines
