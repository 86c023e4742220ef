"""Devices for tests: keys, pairs that trust each other, links over real sockets of this machine."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from port_agent.peers.connection.link import PeerLink
from port_agent.peers.connection.messages import Heartbeat
from port_agent.peers.connection.tls import TlsEngine, dialing_context, listening_context
from port_agent.peers.exchange.answers import NotAnsweredError, PeerClient, Topic
from port_agent.peers.fleet.paired import PairedDevice, device_of
from port_agent.peers.identity.keys import Identity, key_file, read_identity
from port_agent.peers.identity.make import new_key_and_certificate

HEARTBEAT = Heartbeat(name="attic", board="a board", state="idle", charging=True, today_joules=12.5)
PAIRED_AT = 1_700_000_000.0


class Contents(dict[str, bytes]):
    """An answerer with contents by name, that solves a problem by turning it round."""

    refusal = ""
    """Why nothing is solved."""
    solving_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.solved: list[tuple[str, float]] = []
        self.begun = 0
        self.stopped = 0

    async def shared(self, topic: Topic, name: str) -> bytes:
        content = self.get(f"{topic} {name}")
        if content is None:
            raise NotAnsweredError(f"no {topic} of this name")
        return content

    def check_solving(self) -> None:
        if self.refusal:
            raise NotAnsweredError(self.refusal)

    async def federate(self, client: PeerClient, request: bytes) -> bytes:
        return client.name.encode() + request

    async def migrate(self, client: PeerClient, request: bytes) -> bytes:
        return client.id.encode() + request

    async def introduce(self, client: PeerClient) -> bytes:
        return client.name.encode()

    async def solve(self, client: str, problem: bytes, seconds: float) -> bytes:
        self.begun += 1
        try:
            await asyncio.sleep(self.solving_s)
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        self.solved.append((client, seconds))
        return problem[::-1]


def identity(folder: Path) -> Identity:
    """Return a new device's identity, kept in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pem, digest = new_key_and_certificate()
    file = folder / "identity.pem"
    file.write_bytes(key_file(pem, digest))
    return read_identity(file)


def as_paired(device: Identity, name: str, address: tuple[str, int] | None = None) -> PairedDevice:
    """Return what others keep of a device."""
    return device_of(device.certificate, name, PAIRED_AT, address)


def engines(root: Path) -> tuple[TlsEngine, TlsEngine]:
    """Return the two ends of a connection between devices that trust each other: who called, who listened."""
    one, two = identity(root / "one"), identity(root / "two")
    return (
        TlsEngine(dialing_context(one, [two.certificate]), listens=False),
        TlsEngine(listening_context(two, [one.certificate]), listens=True),
    )


def shake(caller: TlsEngine, listener: TlsEngine) -> None:
    """Let two engines shake hands; raises what either raises."""
    caller.begin()
    while data := caller.to_send():
        listener.receive(data)
        caller.receive(listener.to_send())


@asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[tuple[int, "asyncio.Queue[PeerLink]"]]:
    """Listen on this machine; gives the port and the links of those who called."""
    arrived: asyncio.Queue[PeerLink] = asyncio.Queue()

    def accept() -> PeerLink:
        link = PeerLink(TlsEngine(context, listens=True), lambda link: None)
        arrived.put_nowait(link)
        return link

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], arrived
    finally:
        server.close()


async def call(port: int, context: ssl.SSLContext) -> PeerLink:
    """Return a link to a port of this machine."""
    loop = asyncio.get_running_loop()
    engine = TlsEngine(context, listens=False)
    _, link = await loop.create_connection(lambda: PeerLink(engine, lambda link: None), "127.0.0.1", port)
    return link


@asynccontextmanager
async def linked(root: Path) -> AsyncIterator[tuple[PeerLink, PeerLink]]:
    """Give both ends of a link that has greeted: who called, who listened."""
    one, two = identity(root / "one"), identity(root / "two")
    async with listening(listening_context(two, [one.certificate])) as (port, arrived):
        caller = await call(port, dialing_context(one, [two.certificate]))
        listener = await arrived.get()
        await asyncio.gather(caller.greet("1"), listener.greet("1"))
        try:
            yield caller, listener
        finally:
            caller.close("done")
            listener.close("done")
