"""A listening socket that no client can exhaust.

The number of connections is limited; at the limit, an idle one is closed for a new one.

It accepts by itself because asyncio's servers accept whatever comes, and stop for a second when descriptors run out.
"""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from port_agent.control.http import HEADER_LIMIT_BYTES, Handler, serve_connection

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_BACKLOG = 128
"""Connections that the kernel queues until they are accepted; they take no descriptors of this process."""
_RETRY_S = 0.05
"""Seconds before accepting again after descriptors ran out; a closed connection has freed its own by then."""


@dataclass(slots=True, eq=False)
class _Connection:
    transport: asyncio.Transport | None = None
    is_waiting: bool = False
    """Whether the connection waits for the client's next request, or for the client to read data."""


class Listener:
    """Serves the connections of one socket, at most `most` at once."""

    def __init__(
        self, sock: socket.socket, handler: Handler, refuse: Callable[[asyncio.StreamWriter], str], *, most: int
    ) -> None:
        """Take over a bound socket and listen; needs a running loop. `refuse`: see `serve_connection`."""
        self._socket, self._handler, self._refuse, self._most = sock, handler, refuse, most
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        """Open connections, the longest waiting first."""
        self._reserve: int | None = None
        self._keep_reserve()
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._watch()

    def close(self) -> None:
        """Stop listening, and close idle connections; answers in progress continue."""
        self._loop.remove_reader(self._socket)
        if self._retry is not None:
            self._retry.cancel()
        while self._drop_longest_waiting():
            pass
        self._socket.close()
        self._spend_reserve()

    def _watch(self) -> None:
        self._loop.add_reader(self._socket, self._on_newcomer)

    def _on_newcomer(self) -> None:
        """Accept one connection; called again at once while there are more."""
        try:
            sock, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR and not self._spend_reserve():
                self._drop_longest_waiting()
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(_RETRY_S, self._watch)
            return  # otherwise the client has already disconnected
        if len(self._connections) >= self._most and not self._drop_longest_waiting():
            sock.close()  # all are being answered
            return
        sock.setblocking(False)
        connection = _Connection()
        task = self._loop.create_task(self._serve(sock, connection))
        self._connections[task] = connection
        task.add_done_callback(self._forget)

    async def _serve(self, sock: socket.socket, connection: _Connection) -> None:
        reader = asyncio.StreamReader(HEADER_LIMIT_BYTES, self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        try:
            transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, sock)
        except OSError:
            sock.close()
            return
        connection.transport = transport

        def waits(is_waiting: bool) -> None:
            connection.is_waiting = is_waiting
            if is_waiting and (task := asyncio.current_task()) in self._connections:
                self._connections[task] = self._connections.pop(task)

        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        await serve_connection(reader, writer, self._handler, self._refuse, waits)

    def _drop_longest_waiting(self) -> bool:
        """Close the connection that has waited longest; return whether there is one."""
        for task, connection in self._connections.items():
            if connection.is_waiting and connection.transport is not None:
                del self._connections[task]
                connection.transport.abort()
                return True
        return False

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._connections.pop(task, None)
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        """Reserve a descriptor for when no other is left."""
        if self._reserve is None and self._socket.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _spend_reserve(self) -> bool:
        """Release the reserved descriptor; return whether there was one."""
        if self._reserve is None:
            return False
        os.close(self._reserve)
        self._reserve = None
        return True
