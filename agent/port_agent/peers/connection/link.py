"""One connection to a paired device: the bytes of a socket, TLS, frames, messages, and the reason for its end.

All queues are bounded: beyond `WAITING_MESSAGES` received messages the socket is not read, and senders wait while more
than `UNSENT_BYTES` are unsent.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from port_agent.peers.announcement import clean
from port_agent.peers.connection.framing import FrameError, FrameReader, framed
from port_agent.peers.connection.messages import (
    OLDEST_VERSION,
    PEER_MESSAGES,
    Goodbye,
    PeerHello,
    PeerMessage,
    PeerMessageError,
    common_version,
    own_hello,
)
from port_agent.peers.connection.tls import TlsEngine, TlsError
from port_agent.peers.decoding import REASON_LIMIT
from port_agent.peers.identity.device_id import DeviceId
from port_planner.base.errors import PortError

GREETING_S = 8.0
"""Seconds after connecting in which both ends must prove their identity and send their greeting; a
Pi's handshake takes 0.05 s.
"""
WAITING_MESSAGES = 8
MAX_WAITING = 64
"""Largest number of messages in one read of the socket.

Devices send one every few seconds, so more can only be an attempt to fill memory.
"""
UNSENT_BYTES = 256 << 10
_LINGER_S = 2.0
"""Seconds that sending the last message may take."""


class LinkClosedError(PortError):
    """The connection has ended; `offends`: whether the other end did something that no agent does."""

    def __init__(self, reason: str, *, offends: bool = False) -> None:
        self.reason, self.offends = reason, offends
        super().__init__(reason)


class PeerLink(asyncio.Protocol):
    """A connection; `on_end` is called once, with this link, when it ends."""

    def __init__(self, engine: TlsEngine, on_end: "Callable[[PeerLink], None]") -> None:
        self._engine, self._on_end = engine, on_end
        self._frames = FrameReader()
        self._messages: deque[PeerMessage] = deque()
        self._changed = asyncio.Event()
        """Event that is set when something arrived, was sent, or ended."""
        self._may_write = True
        self._transport: asyncio.Transport | None = None
        self._abort: asyncio.TimerHandle | None = None
        self.version = OLDEST_VERSION
        """Protocol version that both ends use, known after the greeting."""
        self.end: LinkClosedError | None = None
        """Why the connection ended; None while it is open."""

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake; raises TypeError for an object that is not a valid stream."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"a link runs over a stream, not over {type(transport).__name__}")
        self._transport = transport
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        """Handle received bytes; anything except messages of a trusted device ends the connection."""
        if self.end is not None:
            return
        try:
            plain = self._engine.receive(data)
            self._flush()
            for frame in self._frames.feed(plain):
                self._take(PEER_MESSAGES.decode(frame))
        except TlsError as error:  # anybody on the way can bring that about
            self._flush()
            self._finish(LinkClosedError(str(error)))
            return
        except (FrameError, PeerMessageError) as error:
            self.close(str(error), offends=True)
            return
        if len(self._messages) >= WAITING_MESSAGES and self._transport is not None:
            self._transport.pause_reading()
        self._changed.set()

    def eof_received(self) -> bool:
        """Let the connection close."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Record the end."""
        reason = (getattr(exc, "strerror", None) or str(exc)) if exc else "the other end closed the connection"
        self._finish(LinkClosedError(reason))
        if self._abort is not None:
            self._abort.cancel()  # it would hold the connection's memory

    def pause_writing(self) -> None:
        """Make senders wait."""
        self._may_write = False

    def resume_writing(self) -> None:
        """Wake senders blocked on back-pressure."""
        self._may_write = True
        self._changed.set()

    # --- what the agent calls

    async def greet(self, software: str) -> tuple[DeviceId, PeerHello]:
        """Return the other end's identity and greeting, once both ends have proved their identity.

        Raises LinkClosedError if that fails or takes longer than `GREETING_S`.
        """
        own = own_hello(software)
        try:
            async with asyncio.timeout(GREETING_S):
                await self._until(lambda: self._engine.is_ready)
                await self.send(own)
                first = await self.receive()
        except TimeoutError:
            raise self.close(f"no greeting within {GREETING_S:.0f} s") from None
        if not isinstance(first, PeerHello):
            raise self.close("the first message was not a greeting", offends=True)
        try:
            self.version = common_version(own, first)
        except PeerMessageError as error:
            raise self.close(str(error)) from error
        return self._engine.peer_id(), first

    async def send(self, message: PeerMessage) -> None:
        """Send a message, waiting while the other end reads too slowly; raises LinkClosedError."""
        await self.writable()
        self._write(message)

    async def writable(self) -> None:
        """Wait while the other end reads too slowly; raises LinkClosedError."""
        await self._until(lambda: self._may_write and self.end is None)

    def send_soon(self, message: PeerMessage) -> bool:
        """Send a message unless the other end reads too slowly; return whether it was sent."""
        if self.end is not None or not self._may_write:
            return False
        self._write(message)
        return self.end is None

    async def receive(self) -> PeerMessage:
        """Return the next message.

        Raises LinkClosedError once the connection has ended, also by the other end's `Goodbye`.
        """
        await self._until(lambda: bool(self._messages))
        message = self._messages.popleft()
        if len(self._messages) < WAITING_MESSAGES and self._transport is not None and self.end is None:
            self._transport.resume_reading()
        return message

    def close(self, reason: str, *, offends: bool = False) -> LinkClosedError:
        """End the connection and send the reason to the other end; return the error to raise."""
        if self.end is None:
            if self._engine.is_ready:
                self._write(Goodbye(reason=reason[:REASON_LIMIT]))
            self._engine.end()
            self._flush()
            self._finish(LinkClosedError(reason, offends=offends))
        return self._ended()

    # --- inside

    def _take(self, message: PeerMessage) -> None:
        if isinstance(message, Goodbye):
            self._finish(LinkClosedError(f"the other agent ended it: {clean(message.reason, REASON_LIMIT)}"))
        elif len(self._messages) >= MAX_WAITING:
            raise PeerMessageError(f"{MAX_WAITING} messages are waiting and more arrive")
        else:
            self._messages.append(message)

    def _write(self, message: PeerMessage) -> None:
        try:
            self._engine.send(framed(PEER_MESSAGES.encode(message)))
        except TlsError as error:
            self._finish(LinkClosedError(str(error)))
            return
        self._flush()

    def _flush(self) -> None:
        data = self._engine.to_send()
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; raises LinkClosedError if the connection ends first."""
        while not condition():
            if self.end is not None:
                raise self._ended()
            self._changed.clear()
            await self._changed.wait()

    def _ended(self) -> LinkClosedError:
        end = self.end or LinkClosedError("the connection is over")
        return LinkClosedError(end.reason, offends=end.offends)

    def _finish(self, end: LinkClosedError) -> None:
        if self.end is not None:
            return
        self.end = end
        if self._transport is not None:
            self._transport.close()
            self._abort = asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)
        self._changed.set()
        self._on_end(self)
