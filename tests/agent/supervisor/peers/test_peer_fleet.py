"""The fleet as the supervisor keeps it: nothing before the first pairing, visible trouble, gone with the last."""

import asyncio
import socket
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from port_agent.health.conditions import HealthBoard
from port_agent.peers.fleet import fleet as fleet_module
from port_agent.peers.fleet.paired import FOLDER, PairedDeviceError
from port_agent.peers.pairing.protocol import NewPartner
from port_agent.policy.config import AgentOptions
from port_agent.supervisor.peers.peer_discovery import PeerDiscovery
from port_agent.supervisor.peers.peer_fleet import PAIRED_FOLDER, FleetKeeper
from port_agent.system.clock import SystemClock
from tests.agent.federate.agents import local_devices
from tests.agent.live_daemon import until
from tests.agent.peers.devices import HEARTBEAT, Contents, identity
from tests.agent.peers.ports import free_port

PATIENCE_S = 120.0


@dataclass
class Home:
    """A keeper with what it reports."""

    root: Path
    port: int = field(default_factory=free_port)
    audits: list[str] = field(default_factory=list)
    ids: list[tuple[str, str]] = field(default_factory=list)
    contents: Contents = field(default_factory=Contents)

    def __post_init__(self) -> None:
        self.own = identity(self.root)
        self.health = HealthBoard()
        clock = SystemClock()
        self.keeper = FleetKeeper(
            self.root,
            self.health,
            clock,
            PeerDiscovery(self.root, self.health, clock),
            lambda: HEARTBEAT,
            self.audits.append,
            lambda whole, short: self.ids.append((whole, short)),
            self.contents,
        )
        self.options = AgentOptions(peer_port=self.port)

    def partner(self, name: str) -> NewPartner:
        return NewPartner(self.own.certificate, name, ("127.0.0.1", self.port))

    def trouble(self) -> list[str]:
        return [item.text for item in self.health.items(time.monotonic()) if item.code == "no-fleet"]


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "CROSS_S", 0.0)
    monkeypatch.setattr(fleet_module, "LOOK_S", 0.05)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def test_nothing_listens_before_the_first_pairing_nor_after_the_last(tmp_path: Path) -> None:
    assert FOLDER == PAIRED_FOLDER

    async def work() -> None:
        one, two = Home(tmp_path / "one"), Home(tmp_path / "two")
        for home in (one, two):
            home.keeper.apply(home.options)
        await asyncio.sleep(0)
        assert one.keeper.port == 0 and not listens(one.port) and one.keeper.rows() == []
        assert one.keeper.paired(two.partner("cellar")) == "cellar"
        two.keeper.paired(one.partner("attic"))
        await until(lambda: bool(one.keeper.rows()[0]["is_connected"] and one.keeper.rows()[0]["board"]))
        (row,) = one.keeper.rows()
        assert (row["state"], row["today_joules"], row["last_heard_s"]) == ("idle", 12.5, 0)
        assert (
            row["id"] == str(two.own.id)
            and one.keeper.port == one.port
            and one.ids == [(str(one.own.id), one.own.id.short)]
        )
        assert one.keeper.unpair(two.own.id.group) and one.audits[0].endswith(f"({two.own.id.group})")
        await until(lambda: not listens(one.port))
        assert one.keeper.port == 0 and one.keeper.rows() == []
        await until(lambda: not two.keeper.rows()[0]["is_connected"])
        await asyncio.gather(one.keeper.stop(), two.keeper.stop())

    run(work())


def test_paired_devices_are_there_after_a_restart(tmp_path: Path) -> None:
    async def work() -> None:
        one = Home(tmp_path / "one")
        one.keeper.apply(one.options)
        one.keeper.paired(NewPartner(identity(tmp_path / "two").certificate, "cellar", ("127.0.0.1", 9)))
        await one.keeper.stop()
        again = FleetKeeper(
            one.root,
            one.health,
            SystemClock(),
            PeerDiscovery(one.root, one.health, SystemClock()),
            lambda: HEARTBEAT,
            one.audits.append,
            lambda whole, short: None,
            one.contents,
        )
        again.apply(one.options)
        assert [row["name"] for row in again.rows()] == ["cellar"]
        await until(lambda: listens(one.port))
        await until(lambda: "port 9" in str(again.rows()[0]["trouble"]))
        await again.stop()

    run(work())


def test_a_port_that_is_taken_is_a_health_item_until_another_is_set(tmp_path: Path) -> None:
    async def work() -> None:
        one = Home(tmp_path / "one")
        with socket.create_server(("", one.port)):
            one.keeper.apply(one.options)
            one.keeper.paired(NewPartner(identity(tmp_path / "two").certificate, "cellar", ("127.0.0.1", 9)))
            await until(lambda: bool(one.trouble()))
            assert f"port {one.port} for paired devices" in one.trouble()[0]
            one.keeper.apply(AgentOptions(peer_port=(other := free_port())))
            await until(lambda: listens(other))
            assert one.trouble() == []
        await one.keeper.stop()

    run(work())


def test_damaged_files_are_named_and_trust_nobody(tmp_path: Path) -> None:
    async def work() -> None:
        one = Home(tmp_path / "one")
        (one.root / FOLDER).mkdir()
        (one.root / FOLDER / "X.json").write_text("{}")
        one.keeper.apply(one.options)
        await until(lambda: bool(one.trouble()))
        assert "damaged files" in one.trouble()[0] and "X.json" in one.trouble()[0] and one.keeper.rows() == []
        with pytest.raises(PairedDeviceError):
            one.keeper.unpair("X")
        await one.keeper.stop()

    run(work())


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells what a process has loaded on Linux alone")
def test_an_agent_that_is_paired_and_sees_nobody_does_without_psutil(tmp_path: Path) -> None:
    with local_devices(tmp_path, "attic", "cellar") as devices:
        for device in devices:
            assert device.process is not None
            assert "psutil" not in Path(f"/proc/{device.process.pid}/maps").read_text(), device.name
