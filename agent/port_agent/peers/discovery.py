"""Announce this agent on the local network and listen for others.

Uses multicast DNS through python-zeroconf.

This module is imported only if discovery is on, because zeroconf takes 5 MB. The announced port is for paired
devices; 0 while there are none.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from zeroconf import (
    DNSOutgoing,
    DNSQuestion,
    DNSText,
    Error,
    IPVersion,
    NonUniqueNameException,
    RecordUpdate,
    RecordUpdateListener,
    ServiceStateChange,
    Zeroconf,
)
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from port_agent.peers.announcement import Announcement, to_text
from port_agent.peers.identity.device_id import is_short_id
from port_agent.peers.interfaces import Interface, multicast_interfaces
from port_agent.peers.sightings import TTL_S, Peer, Sightings
from port_agent.peers.state import PublicState

TYPE = "_port-agent._tcp.local."
LOOK_S = 60.0
"""Seconds between checks for new network interfaces, and before another attempt after a failure."""
NO_NETWORK_LOOK_S = 10.0
"""Seconds between checks while there is no network, because at boot the agent starts before it."""
ANNOUNCE_EVERY_S = 15.0
"""Least seconds between announcements of a state; RFC 6762, section 8.4 allows ten updates a minute."""
ADDRESS_LIMIT = 4
"""Largest number of addresses that are kept for a device."""
MAX_CACHED = 1000
"""Largest number of records that zeroconf keeps, of 9 kB each.

A home's devices need a few dozen, and zeroconf's own limit is ten times this.
"""
_ASK_MS = 3000
"""Milliseconds in which a device that has this one's id must give its address."""
_QUERY, _IN, _TEXT, _SERVER = 0, 1, 16, 33
"""Flags of a question, class IN, types TXT and SRV (RFC 1035, RFC 2782)."""


class _IdTakenError(Exception):
    """Another device announces this one's id, at these addresses."""

    def __init__(self, addresses: tuple[str, ...], port: int) -> None:
        self.addresses, self.port = addresses, port
        super().__init__(f"{addresses} port {port}")


class Discovery:
    """One agent's presence; `report` receives problems, or an empty string once it works.

    `where_key_is` returns the address, among some addresses with a port, at which somebody proves to hold
    this device's key, or "".
    """

    def __init__(
        self,
        announcement: Announcement,
        report: Callable[[str], None],
        where_key_is: Callable[[tuple[str, ...], int], Awaitable[str]],
    ) -> None:
        self._own, self._report, self._where_key_is = announcement, report, where_key_is
        self._sightings = Sightings(announcement.id)
        self._changed = asyncio.Event()
        self._port = 0
        self._announced = self._news
        self.on_received: Callable[[], None] = lambda: None
        """Called after announcements were received."""
        self.interfaces: tuple[Interface, ...] = ()
        """Interfaces on which the device announces itself and listens now."""

    @property
    def own(self) -> Announcement:
        """The current announcement."""
        return self._own

    def show(self, state: PublicState) -> None:
        """Announce another state soon."""
        if state is not self._own.state:
            self._own = replace(self._own, state=state)
            self._changed.set()

    def listens(self, *, port: int, pairing_port: int) -> None:
        """Announce at once the port at which this device listens for paired devices, and the one at which it
        shows a code; 0 for none.
        """
        if (port, pairing_port) != (self._port, self._own.pairing_port):
            self._port, self._own = port, replace(self._own, pairing_port=pairing_port)
            self._changed.set()

    def peers(self, now_s: float) -> tuple[Peer, ...]:
        """Return the agents on the network."""
        return self._sightings.peers(now_s)

    async def run(self) -> None:
        """Announce and listen until cancelled, following networks that appear, change or disappear."""
        while True:
            interfaces = multicast_interfaces()
            if not interfaces:
                self._report("")  # a device without a network is not a problem
                await asyncio.sleep(NO_NETWORK_LOOK_S)
                continue
            try:
                async with self._present_on(interfaces) as node:
                    self._report("")
                    await self._attend(node, interfaces)
            except _IdTakenError as claim:
                self._report(await self._judged(claim))
                await asyncio.sleep(LOOK_S)
            except (OSError, RuntimeError, Error) as error:  # RuntimeError: zeroconf lost an interface on the way
                self._report(str(error) or type(error).__name__)
                await asyncio.sleep(LOOK_S)

    @contextlib.asynccontextmanager
    async def _present_on(self, interfaces: tuple[Interface, ...]) -> AsyncIterator[AsyncZeroconf]:
        """Announce this device while in the block; afterwards say goodbye to the others."""
        is_ipv6 = any(interface.is_ipv6 for interface in interfaces)
        is_ipv4 = any(not interface.is_ipv6 for interface in interfaces)
        node = AsyncZeroconf(
            interfaces=[interface.index if interface.is_ipv6 else interface.address for interface in interfaces],
            ip_version=IPVersion.All if is_ipv4 and is_ipv6 else IPVersion.V6Only if is_ipv6 else IPVersion.V4Only,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(node.async_close)
            await node.zeroconf.async_wait_for_start()
            node.zeroconf.async_add_listener(
                _AnnouncementListener(node.zeroconf, self._sightings, self.on_received), None
            )
            browser = AsyncServiceBrowser(node.zeroconf, TYPE, handlers=[self._on_change])
            stack.push_async_callback(browser.async_cancel)
            stack.push_async_callback(_send_goodbye, node)
            self.interfaces = interfaces
            try:
                self._announced = self._news
                await self._register(node, self._record(interfaces))
                yield node
            finally:
                self.interfaces = ()

    async def _register(self, node: AsyncZeroconf, record: AsyncServiceInfo) -> None:
        """Announce this device; raises _IdTakenError if another device announces the same id."""
        try:
            await node.async_register_service(record)
        except NonUniqueNameException as error:
            other = AsyncServiceInfo(TYPE, record.name)
            await other.async_request(node.zeroconf, _ASK_MS)
            raise _IdTakenError(tuple(other.parsed_scoped_addresses()[:ADDRESS_LIMIT]), other.port or 0) from error

    async def _judged(self, claim: "_IdTakenError") -> str:
        """Return the problem and its remedy if another device announces this one's id."""
        where = await self._where_key_is(claim.addresses, claim.port)
        if where:
            return (
                f"the device at {where} has this one's key, probably by a copy of its state directory; stop its "
                "agent, delete identity.pem there, and pair it again"
            )
        return (
            f"another device on the network claims this one's id {self._own.id}, which anybody can do, but does not "
            "prove to have its key. Paired devices still find this one where they met it last"
        )

    async def _attend(self, node: AsyncZeroconf, interfaces: tuple[Interface, ...]) -> None:
        """Keep the announcement and the list up to date until the interfaces change."""
        began_s = time.monotonic()
        look_s, announce_s = began_s + LOOK_S, began_s + ANNOUNCE_EVERY_S
        while True:
            now_s = time.monotonic()
            self._changed.clear()
            if now_s >= look_s:
                if multicast_interfaces() != interfaces:
                    return
                look_s = now_s + LOOK_S
            new_ports, _ = news = self._news
            if new_ports != self._announced[0] or (news != self._announced and now_s >= announce_s):
                self._announced, announce_s = news, now_s + ANNOUNCE_EVERY_S
                await node.async_update_service(self._record(interfaces))
            _query(node.zeroconf, self._sightings.to_query(now_s))
            moments = [look_s, self._sightings.next_s(), announce_s if news != self._announced else None]
            rest_s = min(moment for moment in moments if moment is not None) - now_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, rest_s)):
                    await self._changed.wait()

    @property
    def _news(self) -> tuple[tuple[int, int], PublicState | None]:
        """Return the changeable parts of the announcement."""
        return (self._port, self._own.pairing_port), self._own.state

    def _record(self, interfaces: tuple[Interface, ...]) -> AsyncServiceInfo:
        return AsyncServiceInfo(
            TYPE,
            f"{self._own.id}.{TYPE}",
            port=self._port,
            properties=to_text(self._own),
            server=f"port-agent-{self._own.id}.local.",
            host_ttl=TTL_S,
            other_ttl=TTL_S,
            parsed_addresses=[interface.address for interface in interfaces],
        )

    def _on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        label = _label(name)
        if label is not None and state_change is ServiceStateChange.Removed:
            self._sightings.gone(label)


class _AnnouncementListener(RecordUpdateListener):
    """Receives all announcements; repeats serve as keep-alives."""

    def __init__(self, zeroconf: Zeroconf, sightings: Sightings, on_received: Callable[[], None]) -> None:
        self._zeroconf, self._sightings, self._on_received = zeroconf, sightings, on_received
        self._received: dict[str, bytes] = {}

    def async_update_records(self, zc: Zeroconf, now: float, records: list[RecordUpdate]) -> None:
        """Handle the announcements in a packet; `now` is in milliseconds."""
        for record in (update.new for update in records):
            label = _label(record.name)
            if label is not None and isinstance(record, DNSText) and not record.is_expired(now):
                self._received[label] = record.text

    def async_update_records_complete(self) -> None:
        """Add them to the list, now that zeroconf also knows the addresses in the packet."""
        for label, text in self._received.items():
            info = AsyncServiceInfo(TYPE, f"{label}.{TYPE}")
            info.load_from_cache(self._zeroconf)
            addresses = tuple(info.parsed_scoped_addresses()[:ADDRESS_LIMIT])
            self._sightings.received(label, text, addresses, time.monotonic(), info.port or 0)
        if self._received:
            self._on_received()
        self._received.clear()
        self._bound_cache()

    def _bound_cache(self) -> None:
        """Empty the cache after a flood of forged records.

        Known agents stay among the sightings, and answer when queried.
        """
        cache = self._zeroconf.cache
        if sum(map(len, cache.cache.values())) > MAX_CACHED:
            cache.async_remove_records([record for records in cache.cache.values() for record in records])


async def _send_goodbye(node: AsyncZeroconf) -> None:
    """Announce to the others that this agent leaves.

    An answer that is still queued would follow the first goodbye and undo it. Later goodbyes are the same packet, which
    zeroconf ignores for a second.
    """
    for waiting in (node.zeroconf.out_queue, node.zeroconf.out_delay_queue):
        waiting.queue.clear()
    await node.async_unregister_all_services()


def _label(name: str) -> str | None:
    """Return the id in a service's name; None for other names."""
    label, dot, rest = name.lower().partition(".")
    return label if dot and rest == TYPE and is_short_id(label) else None


def _query(zeroconf: Zeroconf, labels: list[str]) -> None:
    """Ask all devices for the announcements of these; everybody receives the answers."""
    if not labels:
        return
    question = DNSOutgoing(_QUERY)
    for label in labels:
        for kind in (_TEXT, _SERVER):
            question.add_question(DNSQuestion(f"{label}.{TYPE}", kind, _IN))
    zeroconf.async_send(question)
