"""An introducer: n - 1 codes make n devices trust each other, as each owner chose; whom it names
no more is trusted no more.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from port_agent.health.conditions import HealthBoard
from port_agent.peers.exchange.answers import NotAnsweredError, PeerClient
from port_agent.peers.fleet import fleet as fleet_module
from port_agent.peers.introductions import INTRODUCTIONS
from port_agent.peers.pairing.protocol import NewPartner
from port_agent.policy.config import AgentOptions
from port_agent.supervisor.peers.peer_discovery import PeerDiscovery
from port_agent.supervisor.peers.peer_fleet import FleetKeeper
from port_agent.supervisor.peers.peer_introductions import Introducer
from port_agent.system.clock import SystemClock
from tests.agent.live_daemon import until
from tests.agent.peers.devices import HEARTBEAT, Contents, identity
from tests.agent.peers.ports import free_port

INTRODUCES, CHOSE = AgentOptions(introduces=True), AgentOptions(introducer="attic")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "CROSS_S", 3600.0)  # of calls that cross one is closed, with what it was asked
    monkeypatch.setattr(fleet_module, "CALL_AGAIN_S", 0.05)
    monkeypatch.setattr(fleet_module, "LOOK_S", 0.05)


class Answers(Contents):
    """What a device answers: whom it introduces."""

    introducing: Introducer

    async def introduce(self, client: PeerClient) -> bytes:
        return self.introducing.answer(client)


class Home:
    """A device paired with the given devices, and the introductions that it stores."""

    def __init__(self, root: Path, options: AgentOptions = CHOSE) -> None:
        self.own, self.port, self.audits = identity(root), free_port(), list[str]()
        heartbeat = msgspec.structs.replace(HEARTBEAT, name=root.name)
        health, clock, answers = HealthBoard(), SystemClock(), Answers()
        self.keeper = FleetKeeper(
            root,
            health,
            clock,
            PeerDiscovery(root, health, clock),
            lambda: heartbeat,
            self.audits.append,
            lambda whole, short: None,
            answers,
        )
        self.introducing = answers.introducing = Introducer(self.keeper, self.audits.append)
        self.introducing._options = options
        self.keeper.apply(AgentOptions(peer_port=self.port))

    def pair(self, other: "Home", name: str) -> None:
        self.keeper.paired(NewPartner(other.own.certificate, name, ("127.0.0.1", other.port)))

    def sees(self, other: "Home") -> bool:
        return any(row["id"] == str(other.own.id) and row["is_connected"] for row in self.keeper.rows())

    def trusts(self, other: "Home") -> bool:
        return self.keeper.devices().get(other.own.id) is not None


@asynccontextmanager
async def household(root: Path, introducer: AgentOptions = INTRODUCES) -> AsyncIterator[tuple[Home, Home, Home]]:
    """Give three devices; the first is paired with the others, and these with it alone."""
    attic, cellar, shed = Home(root / "attic", introducer), Home(root / "cellar"), Home(root / "shed")
    for name, other in (("cellar", cellar), ("shed", shed)):
        attic.pair(other, name)
        other.pair(attic, "attic")
    await until(lambda: cellar.sees(attic) and shed.sees(attic))
    try:
        yield attic, cellar, shed
    finally:
        await asyncio.gather(*(home.keeper.stop() for home in (attic, cellar, shed)))


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120.0))


def test_two_that_chose_it_meet_without_a_code_and_end_with_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with household(tmp_path) as (attic, cellar, shed):
            await cellar.introducing.ask("attic")
            assert not cellar.trusts(shed), "shed has not chosen it yet"
            await shed.introducing.ask("attic")
            await cellar.introducing.ask("attic")
            await until(lambda: cellar.sees(shed) and shed.sees(cellar))
            group = shed.own.id.group
            assert f"attic introduced shed ({group}): it is trusted from now on" in cellar.audits
            assert attic.audits == [
                "cellar chose this device as its introducer",
                "shed chose this device as its introducer",
            ]
            attic.keeper.unpair("shed")
            await cellar.introducing.ask("attic")
            assert not cellar.trusts(shed) and "attic no longer introduces shed" in cellar.audits

    run(work())


def test_whom_the_owner_unpaired_is_introduced_no_more_until_paired_by_a_code(tmp_path: Path) -> None:
    async def work() -> None:
        async with household(tmp_path) as (_, cellar, shed):
            await shed.introducing.ask("attic")
            await cellar.introducing.ask("attic")
            assert cellar.trusts(shed)
            cellar.keeper.unpair("shed")
            await cellar.introducing.ask("attic")
            assert not cellar.trusts(shed)
            cellar.pair(shed, "shed")
            cellar.keeper.unpair("shed")
            await cellar.introducing.ask("attic")
            assert cellar.trusts(shed), "a pairing by a code ended the refusal"

    run(work())


def test_nobody_is_named_who_did_not_choose_nor_where_its_owner_says_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with household(tmp_path, AgentOptions()) as (attic, cellar, shed):
            with pytest.raises(NotAnsweredError, match="it introduces nobody"):
                await cellar.introducing.ask("attic")
            attic.introducing._options = INTRODUCES
            shed_asks = PeerClient("shed", str(shed.own.id))
            assert INTRODUCTIONS.decode(attic.introducing.answer(shed_asks)).devices == (), "cellar did not choose it"
            stranger = PeerClient("stranger", "AT-TIC")
            attic.introducing.answer(stranger)
            assert attic.audits == ["shed chose this device as its introducer"]

    run(work())


def test_it_asks_as_the_configuration_says_and_tells_what_is_in_the_way(tmp_path: Path) -> None:
    async def work() -> None:
        cellar = Home(tmp_path / "cellar", AgentOptions())
        cellar.introducing.apply(CHOSE)
        await until(lambda: bool(cellar.introducing.trouble))
        assert "no paired device is called 'attic'" in cellar.introducing.trouble
        cellar.introducing.apply(AgentOptions())
        assert cellar.introducing.trouble == "" and cellar.introducing._task is None
        await cellar.keeper.stop()

    run(work())
