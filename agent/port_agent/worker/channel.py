"""The connection between a worker and its starter, over one end of a socket pair: events up, commands down.

It does not import torch, because both sides use it. A message that this version does not know is skipped.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

from port_agent.worker.protocol import (
    MAX_LINE_BYTES,
    Command,
    Event,
    LineSplitter,
    ProtocolError,
    decode_command,
    decode_event,
    encode_message,
)

_REST_S = 0.005


class Channel:
    """One end of the connection."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.RLock()
        """Reentrant lock, because a second Ctrl-C may arrive while the first one's handler sends."""

    def send(self, message: Event | Command) -> None:
        """Send one message. A peer that is gone is not an error here, because the reading side notices it."""
        data = encode_message(message)
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def events(self) -> Iterator[Event]:
        """Yield the worker's events until it closes the connection."""
        for line in self._lines():
            try:
                event = decode_event(line)
            except ProtocolError:
                continue
            yield event

    def commands(self) -> Iterator[Command]:
        """Yield the supervisor's commands until it closes the connection."""
        for line in self._lines():
            try:
                command = decode_command(line)
            except ProtocolError:
                continue
            yield command

    def commands_on_line(self) -> Iterator[Command]:
        """Yield the supervisor's commands until it closes the connection.

        Each command stays on the line, visible to others, until the next one is requested.

        Nothing is consumed while this thread waits for the interpreter.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        with contextlib.suppress(OSError):
            while poll.poll() and (data := self._socket.recv(MAX_LINE_BYTES + 1, socket.MSG_PEEK)):
                line, end, _ = data.partition(b"\n")
                if not end:
                    if len(data) > MAX_LINE_BYTES:
                        return
                    time.sleep(_REST_S)  # it was cut between two packets
                    continue
                with contextlib.suppress(ProtocolError):
                    yield decode_command(line)
                self._socket.recv(len(line) + 1)

    def listen(self, handle: Callable[[Command], None], gone: Callable[[], None]) -> threading.Thread:
        """Call `handle` for each command in a separate thread, and `gone` when the supervisor
        has closed the connection.
        """

        def run() -> None:
            for command in self.commands():
                handle(command)
            gone()

        thread = threading.Thread(target=run, name="control", daemon=True)
        thread.start()
        return thread

    def shut(self) -> None:
        """End the connection in both directions, which both ends notice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close our end."""
        self._socket.close()

    def _lines(self) -> Iterator[bytes]:
        """Yield lines until the peer closes, or sends one that does not end."""
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
