"""Connections to all paired devices: answers callers, calls devices that are not connected, and
reports this one's activity.

Nothing listens and nothing is called before `run`, which the supervisor starts only while a device is paired.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from port_agent.malloc import release_free_memory
from port_agent.peers.announcement import VERSION_LIMIT, clean
from port_agent.peers.connection.link import LinkClosedError, PeerLink
from port_agent.peers.connection.messages import Heartbeat
from port_agent.peers.connection.tls import TlsEngine, dialing_context, listening_context
from port_agent.peers.exchange.answers import NotAnsweredError, PeerClient, PeerServer, Topic
from port_agent.peers.exchange.exchange import Exchange, ExchangeError
from port_agent.peers.fleet.paired import PairedDevice, PairedDevices
from port_agent.peers.fleet.roster import Roster
from port_agent.peers.identity.device_id import DeviceId
from port_agent.peers.identity.keys import Identity
from port_planner.base.errors import PortError

if TYPE_CHECKING:
    import ssl

Address = tuple[str, int]

HEARTBEAT_S = 10.0
LOOK_S = 5.0
"""Seconds between looks for devices to call, and for silent ones."""
CONNECT_S = 4.0
"""Seconds for a connection: a device of the local network answers within milliseconds, and one that sleeps on
Wi-Fi within a second or two.
"""
CROSS_S = 3.0
"""Seconds by which the device with the larger id delays its calls, so that calls seldom cross."""
CALL_AGAIN_S, CALL_SELDOM_S = 5.0, 60.0
"""Seconds until the next call after a failed one. Each further wait is twice as long, up to the second number."""
MAX_GREETING = 16
"""Largest number of connections of unidentified callers; the oldest makes way. Each takes up to 100 kB."""
MAX_HEARTBEATS = 20
"""Largest number of heartbeats in `HEARTBEAT_S`; a device sends one, and some more while its state changes."""
CUT_OFF_S = 300.0
"""Seconds without connection to a paired device that sent an invalid message."""


class FleetError(PortError):
    """The port for paired devices cannot be used."""


@dataclass(frozen=True, slots=True)
class FleetContext:
    """What a fleet needs from the surrounding agent."""

    software: str
    """The version, sent in the greeting."""
    heartbeat: Callable[[], Heartbeat]
    """Function that returns the current activity of this device."""
    places: Callable[[DeviceId], Iterable[Address]]
    """Function that returns the addresses at which discovery saw a device."""
    server: PeerServer
    """Server that answers the other devices."""
    audit: Callable[[str, str], None]
    """Function that records an event in the history, given the short name of a device and the text."""


@dataclass(slots=True)
class _Calls:
    """Calls to one device or static address: the time of the next one, and the number of failures in a row."""

    next_s: float
    failed: int = 0
    task: asyncio.Task[None] | None = None
    trouble: str = ""


class Fleet:
    """This device among its paired devices. Raises OSError if the key cannot be read."""

    def __init__(self, own: Identity, paired: PairedDevices, context: FleetContext) -> None:
        self._own, self._paired, self._context = own, paired, context
        self.roster = Roster(own.id)
        self._static: tuple[Address, ...] = ()
        self._calls: dict[DeviceId | Address, _Calls] = {}
        self._greeting: dict[PeerLink, None] = {}
        """Unidentified callers, the oldest first."""
        self._exchanges: dict[DeviceId, Exchange] = {}
        """The exchange with each connected device."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut_off: dict[DeviceId, float] = {}
        self._found: dict[Address, DeviceId] = {}
        """The device that answered at each static address."""
        self._wake = asyncio.Event()
        self._announce = False
        self._listening, self._dialing = self._contexts()
        self._shook_hands = False
        """Whether a handshake began since free memory was last released, also one with a stranger."""

    async def run(self, port: int, static: tuple[Address, ...]) -> None:
        """Serve until cancelled; raises FleetError when the port is in use."""
        self._static = static
        try:
            server = await asyncio.get_running_loop().create_server(self._accept, None, port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise FleetError(f"port {port} for paired devices: {reason}; set another `port` under [peers]") from error
        try:
            await self._attend()
        finally:
            server.close()
            for link in self.roster.links():
                link.close("the agent is stopping")
            for task in self._tasks:
                task.cancel()

    def announce(self) -> None:
        """Report this device's activity to the others soon."""
        self._announce = True
        self._wake.set()

    def look(self) -> None:
        """Call a device that was just discovered."""
        self._wake.set()

    def refresh(self) -> None:
        """Accept exactly the devices that are paired now; raises OSError."""
        self._listening, self._dialing = self._contexts()
        for device in [key for key in self._calls if isinstance(key, DeviceId) and self._paired.get(key) is None]:
            self._calls.pop(device)
        self._wake.set()

    def drop(self, device: DeviceId) -> None:
        """End the connection of a device that is no longer paired; raises OSError."""
        self._paired.remove(device)
        link = self.roster.forget(device)
        if link is not None:
            link.close("unpaired there")
        self.refresh()

    def trouble(self, device: DeviceId) -> str:
        """Return why a device could not be reached the last time, or ""."""
        calls = self._calls.get(device)
        return calls.trouble if calls is not None else ""

    async def ask(self, device: DeviceId, topic: Topic, name: str, problem: bytes = b"", seconds: float = 0.0) -> bytes:
        """Return a device's answer; raises NotAnsweredError with the reason if there is none."""
        exchange = self._exchanges.get(device)
        if exchange is None:
            raise NotAnsweredError(self.trouble(device) or "it is not connected")
        try:
            return await exchange.ask(topic, name, problem, seconds)
        except LinkClosedError as error:
            raise NotAnsweredError(f"the connection ended: {error.reason}") from error

    def cut(self, device: PairedDevice, reason: str) -> None:
        """Disconnect a device for a while because it sent something that no agent sends, and record that."""
        self._cut_off[device.id] = time.monotonic() + CUT_OFF_S
        self._context.audit(device.name, f"blocked for {CUT_OFF_S / 60:.0f} minutes: {reason}")
        member = self.roster.member(device.id)
        if member is not None:
            member.link.close(reason)

    # --- calling

    async def _attend(self) -> None:
        next_heartbeat_s = 0.0
        while True:
            now_s = time.monotonic()
            for link in self.roster.silent(now_s):
                link.close("nothing was received for too long")
            if self._announce or now_s >= next_heartbeat_s:
                self._announce, next_heartbeat_s = False, now_s + HEARTBEAT_S
                heartbeat = self._context.heartbeat()
                for link in self.roster.links():
                    link.send_soon(heartbeat)
                self._give_memory_back()
            self._call_who_is_missing(now_s)
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()

    def _give_memory_back(self) -> None:
        """Release memory left over from handshakes, once for all recent connections."""
        if self._shook_hands:
            self._shook_hands = False
            release_free_memory()

    def _call_who_is_missing(self, now_s: float) -> None:
        for device in self._paired.all():
            if self.roster.member(device.id) is None and self._cut_off.get(device.id, 0.0) <= now_s:
                places = [*self._context.places(device.id), *([device.address] if device.address else [])]
                if places:
                    wait_s = 0.0 if self._own.id < device.id else CROSS_S
                    self._call(device.id, places, now_s, wait_s)
        missing = any(self.roster.member(device.id) is None for device in self._paired.all())
        for address in self._static if missing else ():
            if self._found.get(address) is None or self.roster.member(self._found[address]) is None:
                self._call(address, [address], now_s, 0.0)

    def _call(self, key: DeviceId | Address, places: list[Address], now_s: float, wait_s: float) -> None:
        calls = self._calls.setdefault(key, _Calls(now_s + wait_s))
        if calls.task is None and now_s >= calls.next_s:
            calls.task = self._start(self._try_places(calls, list(dict.fromkeys(places)), key))
        elif calls.task is None:
            asyncio.get_running_loop().call_later(calls.next_s - now_s, self._wake.set)

    async def _try_places(self, calls: _Calls, places: list[Address], whom: DeviceId | Address) -> None:
        """Call one place after another, and keep the first connection that is answered."""
        met = False
        try:
            for place in places:
                met = await self._try(calls, place, whom)
                if met:
                    break
        finally:
            calls.task = None
            calls.failed = 0 if met else calls.failed + 1
            wait_s = CALL_AGAIN_S * 2.0 ** max(0, min(calls.failed - 1, 10))
            calls.next_s = time.monotonic() + min(wait_s, CALL_SELDOM_S)

    async def _try(self, calls: _Calls, place: Address, whom: DeviceId | Address) -> bool:
        """Call a place and stay until the connection ends; return whether the called device answered.

        At a static address, any paired device counts.
        """
        loop = asyncio.get_running_loop()
        self._shook_hands = True
        try:
            async with asyncio.timeout(CONNECT_S):
                _, link = await loop.create_connection(
                    lambda: PeerLink(TlsEngine(self._dialing, listens=False), self._on_end), *place
                )
        except (OSError, TimeoutError) as error:
            calls.trouble = f"{place[0]} port {place[1]}: {_why(error)}"
            return False
        try:
            return await self._serve(link, place, whom if isinstance(whom, DeviceId) else None)
        except LinkClosedError as end:
            calls.trouble = f"{place[0]} port {place[1]}: {end.reason}"
            return False

    # --- answering

    def _contexts(self) -> "tuple[ssl.SSLContext, ssl.SSLContext]":
        """Return the listening and the calling context: one of each for all connections, because each takes 25 kB."""
        trusted = [device.certificate for device in self._paired.all()]
        return listening_context(self._own, trusted), dialing_context(self._own, trusted)

    def _accept(self) -> PeerLink:
        self._shook_hands = True
        link = PeerLink(TlsEngine(self._listening, listens=True), self._on_end)
        self._greeting[link] = None
        while len(self._greeting) > MAX_GREETING:
            next(iter(self._greeting)).close("too many callers")
        self._start(self._answer(link))
        return link

    async def _answer(self, link: PeerLink) -> None:
        with contextlib.suppress(LinkClosedError):  # a stranger, or a device that lost its way
            await self._serve(link, None)

    def _on_end(self, link: PeerLink) -> None:
        self._greeting.pop(link, None)
        self._wake.set()

    # --- one connection

    async def _serve(self, link: PeerLink, place: Address | None, whom: DeviceId | None = None) -> bool:
        """Take part in a connection until it ends; return True then.

        Raises LinkClosedError if it ends before both ends know each other. `place`: the address that was called; None
        for a caller. `whom`: the device that is expected there.
        """
        device, hello = await link.greet(self._context.software)
        self._greeting.pop(link, None)
        known = self._paired.get(device)
        if known is None or self._cut_off.get(device, 0.0) > time.monotonic():
            raise link.close("not paired" if known is None else "temporarily blocked")
        if whom is not None and device != whom:
            raise link.close(f"{known.name} answered, but another device was called")
        software = clean(hello.software, VERSION_LIMIT)
        loser = self.roster.arrive(
            device, link, dialed_by_us=place is not None, software=software, now_s=time.monotonic()
        )
        if loser is not None:
            loser.close("another connection is kept")
        try:
            if loser is not link:
                await self._converse(known, link, place)
        except LinkClosedError as end:
            if end.offends:
                self.cut(known, end.reason)
        finally:
            self.roster.leave(device, link)
        return True

    async def _converse(self, device: PairedDevice, link: PeerLink, place: Address | None) -> None:
        if place is not None and place in self._static:
            self._found[place] = device.id
        calls = self._calls.get(device.id)
        if calls is not None:
            calls.trouble = ""
        link.send_soon(self._context.heartbeat())
        exchange = self._exchanges[device.id] = Exchange(
            link, self._context.server, PeerClient(device.name, str(device.id))
        )
        try:
            await self._listen(device, link, exchange, place)
        finally:
            exchange.end()
            if self._exchanges.get(device.id) is exchange:
                del self._exchanges[device.id]

    async def _listen(self, device: PairedDevice, link: PeerLink, exchange: Exchange, place: Address | None) -> None:
        began_s, count = time.monotonic(), 0
        while True:
            message = await link.receive()
            now_s = time.monotonic()
            if not isinstance(message, Heartbeat):
                self.roster.notice(device.id, link, now_s)
                try:
                    exchange.take(message)
                except ExchangeError as error:
                    raise link.close(str(error), offends=True) from error
                continue
            if now_s - began_s > HEARTBEAT_S:
                began_s, count = now_s, 0
            count += 1
            if count > MAX_HEARTBEATS:
                raise link.close(f"more than {MAX_HEARTBEATS} heartbeats in {HEARTBEAT_S:.0f} s", offends=True)
            is_first = self.roster.receive(device.id, link, message, now_s)
            if is_first:
                await self._note_where(device.id, message.name, place)

    async def _note_where(self, device: DeviceId, name: str, place: Address | None) -> None:
        with contextlib.suppress(OSError):  # a hint
            renamed = await asyncio.to_thread(self._paired.met, device, name, place)
            if renamed is not None:
                self._context.audit(renamed[0], f"it is now called {renamed[1]} ({device.group})")

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _why(error: OSError) -> str:
    """Return why a call failed, without the address that asyncio's text contains."""
    if isinstance(error, TimeoutError):
        return "no answer"
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
