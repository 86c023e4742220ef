"""Fleets over real sockets of this machine: they find each other, notice an end, and cut off who misbehaves."""

import asyncio
import contextlib
import gc
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from port_agent.peers.connection.framing import framed
from port_agent.peers.connection.link import LinkClosedError, PeerLink
from port_agent.peers.connection.messages import Heartbeat, own_hello
from port_agent.peers.connection.tls import dialing_context
from port_agent.peers.exchange.answers import NotAnsweredError, Topic
from port_agent.peers.fleet import fleet as fleet_module
from port_agent.peers.fleet import roster as roster_module
from port_agent.peers.fleet.fleet import MAX_GREETING, Fleet, FleetContext, FleetError
from port_agent.peers.fleet.paired import PairedDevices
from port_agent.peers.identity.device_id import DeviceId
from port_agent.peers.identity.keys import Identity
from tests.agent.live_daemon import until
from tests.agent.peers.devices import HEARTBEAT, Contents, as_paired, call, identity

PATIENCE_S = 120.0
NAME = "ab" * 32


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@dataclass
class Node:
    """A device with its fleet."""

    root: Path
    own: Identity
    port: int = field(default_factory=free_port)
    audits: list[str] = field(default_factory=list)
    heartbeat: Heartbeat = HEARTBEAT
    places: dict[DeviceId, tuple[str, int]] = field(default_factory=dict)
    server: Contents = field(default_factory=Contents)

    def __post_init__(self) -> None:
        self.heartbeat = msgspec.structs.replace(HEARTBEAT, name=self.root.name)
        self.paired = PairedDevices(self.root)
        context = FleetContext(
            "1.0",
            lambda: self.heartbeat,
            lambda device: [self.places[device]] if device in self.places else [],
            self.server,
            lambda name, what: self.audits.append(f"{name}: {what}"),
        )
        self.fleet = Fleet(self.own, self.paired, context)

    def trusts(self, other: "Node", *, where: bool = False) -> None:
        self.paired.add(as_paired(other.own, other.root.name, ("127.0.0.1", other.port) if where else None))
        self.fleet.refresh()

    def sees(self, other: "Node") -> bool:
        member = self.fleet.roster.member(other.own.id)
        return member is not None and member.heartbeat is not None

    @asynccontextmanager
    async def running(self, *static: tuple[str, int]) -> AsyncIterator[None]:
        task = asyncio.create_task(self.fleet.run(self.port, static))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})


def node(root: Path, name: str) -> Node:
    return Node(root / name, identity(root / name))


def pair(root: Path, *, where: bool = True) -> tuple[Node, Node]:
    one, two = node(root, "one"), node(root, "two")
    one.trusts(two, where=where)
    two.trusts(one)
    return one, two


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "CROSS_S", 0.0)
    monkeypatch.setattr(fleet_module, "LOOK_S", 0.05)
    monkeypatch.setattr(fleet_module, "CALL_AGAIN_S", 0.05)


def test_two_that_are_paired_hear_each_other_and_what_changes(tmp_path: Path) -> None:
    async def work() -> None:
        one, two = pair(tmp_path)
        two.heartbeat = replace_heartbeat(state="training", job="birds")
        async with one.running(), two.running():
            await until(lambda: one.sees(two) and two.sees(one))
            received = one.fleet.roster.last_heartbeat(two.own.id)
            assert received is not None and received[1].job == "birds"
            two.heartbeat = replace_heartbeat(state="paused")
            two.fleet.announce()
            await until(lambda: (one.fleet.roster.last_heartbeat(two.own.id) or received)[1].state == "paused")
            assert two.fleet.trouble(one.own.id) == ""
        assert one.audits == two.audits == []

    run(work())


def replace_heartbeat(**changes: object) -> Heartbeat:
    values = {name: getattr(HEARTBEAT, name) for name in HEARTBEAT.__struct_fields__}
    return Heartbeat(**{**values, "name": "two", **changes})


def test_both_know_where_the_other_is_and_keep_one_connection(tmp_path: Path) -> None:
    async def work() -> None:
        one, two = pair(tmp_path)
        two.places[one.own.id] = ("127.0.0.1", one.port)
        async with one.running(), two.running():
            await until(lambda: one.sees(two) and two.sees(one))
            await until(lambda: len(one.fleet.roster.links()) == len(two.fleet.roster.links()) == 1)

    run(work())


def test_a_static_address_is_enough_and_tells_who_it_is(tmp_path: Path) -> None:
    async def work() -> None:
        one, two = pair(tmp_path, where=False)
        async with two.running(), one.running(("127.0.0.1", two.port)):
            await until(lambda: one.sees(two) and two.sees(one))
            await until(lambda: (known := one.paired.get(two.own.id)) is not None and known.address is not None)

    run(work())


def test_one_that_ends_is_gone_and_found_again(tmp_path: Path) -> None:
    async def work() -> None:
        one, two = pair(tmp_path)
        async with one.running():
            async with two.running():
                await until(lambda: one.sees(two))
            await until(lambda: not one.sees(two))
            await until(lambda: "port" in one.fleet.trouble(two.own.id))
            again = Node(two.root, two.own, two.port)
            again.paired.load()
            again.fleet.refresh()
            async with again.running():
                await until(lambda: one.sees(two))

    run(work())


def test_one_that_is_silent_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "SILENT_S", 0.2)

    async def work() -> None:
        one, two = pair(tmp_path)
        async with one.running(), two.running():
            await until(lambda: one.sees(two))
            (link,) = two.fleet.roster.links()
            monkeypatch.setattr(link, "send_soon", lambda message: False)  # as if its cable were cut
            ended = one.fleet.roster.links()[0]
            await until(lambda: ended.end is not None)
            assert "nothing was received" in str(ended.end)

    run(work())


def test_unpaired_it_is_gone_at_once_and_let_in_no_more(tmp_path: Path) -> None:
    async def work() -> None:
        one, two = pair(tmp_path)
        async with one.running(), two.running():
            await until(lambda: one.sees(two) and two.sees(one))
            two.fleet.drop(one.own.id)
            assert not two.sees(one) and two.paired.all() == ()
            await until(lambda: not one.sees(two))
            await until(lambda: "alert" in one.fleet.trouble(two.own.id))
            assert two.fleet.roster.links() == ()

    run(work())


@asynccontextmanager
async def caller(of: Node, as_who: Node) -> AsyncIterator[PeerLink]:
    """Give a greeted link of a device that is no fleet, so that it can misbehave."""
    link = await call(of.port, dialing_context(as_who.own, [of.own.certificate]))
    await link.greet("1")
    try:
        yield link
    finally:
        link.close("")


@pytest.mark.parametrize("offence", ["flood", "hello again", "junk", "endless frame"])
def test_a_paired_device_that_misbehaves_is_cut_off_and_written_down(tmp_path: Path, offence: str) -> None:
    async def work() -> None:
        one, two = pair(tmp_path, where=False)
        async with two.running():
            await until(lambda: listens(two.port))
            async with caller(two, one) as link:
                match offence:
                    case "flood":
                        for _ in range(fleet_module.MAX_HEARTBEATS + 1):
                            link.send_soon(one.heartbeat)
                            await asyncio.sleep(0)
                    case "hello again":
                        link.send_soon(own_hello("1"))
                    case "junk":
                        link._engine.send(framed(os.urandom(500)))
                        link._flush()
                    case _:
                        link._engine.send(struct.pack(">I", 1 << 31))
                        link._flush()
                await until(lambda: bool(two.audits))
                assert two.audits[0].startswith("one: blocked for 5 minutes: ")
            with contextlib.suppress(Exception):
                async with caller(two, one) as again:
                    await again.receive()
            await until(lambda: not two.fleet.roster.links())

    run(work())


def test_paired_devices_answer_each_other_until_one_is_cut_off(tmp_path: Path) -> None:
    async def work() -> None:
        one, two = pair(tmp_path)
        two.server[f"plan {NAME}"] = b"a plan"
        async with one.running(), two.running():
            with pytest.raises(NotAnsweredError, match="not connected"):
                await one.fleet.ask(two.own.id, Topic.PLAN, NAME)
            await until(lambda: one.sees(two) and two.sees(one))
            assert await one.fleet.ask(two.own.id, Topic.PLAN, NAME) == b"a plan"
            assert await two.fleet.ask(one.own.id, Topic.SOLVE, NAME, b"abc", 1.0) == b"cba"
            assert one.server.solved == [("two", 1.0)] and one.audits == two.audits == []
            two.server.solving_s = 60.0
            asking = asyncio.create_task(one.fleet.ask(two.own.id, Topic.SOLVE, NAME, b"abc", 1.0))
            await until(lambda: two.server.solved == [] and not asking.done())
            device = one.paired.get(two.own.id)
            assert device is not None
            one.fleet.cut(device, "its plan does not fit")
            with pytest.raises(NotAnsweredError, match="the connection ended: its plan does not fit"):
                await asking
            assert one.audits == ["two: blocked for 5 minutes: its plan does not fit"]
            await until(lambda: not two.fleet.roster.links())
            with pytest.raises(LinkClosedError):
                async with caller(one, two) as again:
                    await again.receive()
            assert not one.fleet.roster.links() and not one.fleet._exchanges

    run(work())


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def test_silent_callers_do_not_keep_a_paired_device_out(tmp_path: Path) -> None:
    async def work() -> None:
        one, two = pair(tmp_path)
        async with two.running():
            await until(lambda: listens(two.port))
            strangers = [await asyncio.open_connection("127.0.0.1", two.port) for _ in range(3 * MAX_GREETING)]
            await until(lambda: len(two.fleet._greeting) <= MAX_GREETING)
            async with one.running():
                await until(lambda: one.sees(two))
            for _, writer in strangers:
                writer.close()

    run(work())


def test_a_port_that_is_taken_says_so(tmp_path: Path) -> None:
    async def work() -> None:
        one, _ = pair(tmp_path)
        with (
            socket.create_server(("127.0.0.1", one.port)),
            pytest.raises(FleetError, match=f"port {one.port} .*set another"),
        ):
            await one.fleet.run(one.port, ())

    run(work())


CONNECTIONS = 500


@pytest.mark.long
def test_500_paired_connections_that_open_and_close_leak_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        one, two = pair(tmp_path, where=False)
        async with two.running():
            await until(lambda: listens(two.port))
            figures = []
            for number in range(CONNECTIONS):
                async with caller(two, one) as link:
                    link.send_soon(HEARTBEAT)
                    await until(lambda: two.sees(one))
                await until(lambda: not two.fleet.roster.links())
                if number in (CONNECTIONS // 5, CONNECTIONS - 1):
                    await until(lambda: not two.fleet._tasks)
                    gc.collect()
                    figures.append(figures_now())
            (files, before_kb), (files_after, after_kb) = figures
            assert abs(files_after - files) <= 3, "descriptors"
            assert after_kb - before_kb < 1500, f"{after_kb - before_kb} kB more after {CONNECTIONS} connections"

    run(work())


def figures_now() -> tuple[int, int]:
    """Return this process's open descriptors, and its resident memory in kB."""
    text = Path("/proc/self/status").read_text()
    return len([*Path("/proc/self/fd").iterdir()]), int(text.partition("VmRSS:")[2].split()[0])
