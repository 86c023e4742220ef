"""All that concerns other devices behind one door."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest

from port_agent.health.conditions import HealthBoard
from port_agent.jobs.store import JobStore
from port_agent.peers.announcement import Announcement
from port_agent.peers.exchange.answers import PeerClient
from port_agent.peers.sightings import Peer
from port_agent.peers.state import PublicState
from port_agent.policy.config import AgentOptions
from port_agent.supervisor.peers.pairing import PairingRefusedError
from port_agent.supervisor.peers.peer_answers import FederatedContext
from port_agent.supervisor.peers.peers import HISTORY_KIND, Peers
from port_agent.system.clock import SystemClock
from tests.agent.peers.devices import HEARTBEAT

pytestmark = pytest.mark.process

OFF = AgentOptions(pairing_port=1, peer_name="attic")


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120.0))


async def nothing_moves(client: PeerClient, request: bytes) -> bytes:
    return b""


def peers_in(root: Path) -> tuple[Peers, JobStore]:
    store = JobStore(root)
    training = FederatedContext(lambda: "", lambda job: None, lambda: None)
    return Peers(
        root, HealthBoard(), SystemClock(), store, lambda name: HEARTBEAT, lambda: "", training, nothing_moves
    ), store


def showing(short: str, port: int, *addresses: str) -> Peer:
    return Peer(Announcement(short * 12, f"device {short}", "b", "1", PublicState.IDLE, 1, port), addresses, 0.0, 0.0)


def test_the_device_that_shows_a_code_is_found_or_has_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        peers, store = peers_in(tmp_path)
        peers.apply(OFF)
        seen: list[Peer] = [showing("a", 0, "10.0.0.1"), showing("b", 9479)]
        monkeypatch.setattr(peers.discovery, "seen", lambda: tuple(seen))
        with pytest.raises(PairingRefusedError, match=r"no device on the network shows a code; .* --at HOST"):
            await peers.type_code("482193059", None, None)
        seen.append(showing("c", 9, "127.0.0.1"))
        with pytest.raises(PairingRefusedError, match=r"no device shows a code at 127.0.0.1 port 9"):
            await peers.type_code("482193059", None, None)
        seen.append(showing("d", 9, "127.0.0.2"))
        with pytest.raises(PairingRefusedError, match=r"several devices show a code \(device c, device d\)"):
            await peers.type_code("482193059", None, None)
        with pytest.raises(PairingRefusedError, match=r"127.0.0.3 port 1 "):
            await peers.type_code("482193059", "127.0.0.3", None)
        await peers.stop()
        store.close()

    run(work())


def test_what_happened_is_shown_newest_last_and_nothing_of_jobs(tmp_path: Path) -> None:
    async def work() -> None:
        peers, store = peers_in(tmp_path)
        peers.apply(OFF)
        store.note(1.0, None, "submitted", "no affair of peers")
        for number in range(12):
            store.note(float(number), None, HISTORY_KIND, f"event {number}")
        history = peers.describe()
        assert history["history"] == [{"at": float(number), "text": f"event {number}"} for number in range(2, 12)]
        own = history["own"]
        assert isinstance(own, dict) and (own["name"], own["today_joules"]) == (HEARTBEAT.name, 12.5)
        assert history["federations"] == []
        assert (history["paired"], history["device_id"], history["port"], history["peers"]) == ([], None, None, None)
        with pytest.raises(PairingRefusedError):
            await peers.type_code("482193059", "127.0.0.1", 1)
        assert len(str(peers.describe()["device_id"])) == 63, "made when first needed"
        assert (await peers.pairing_outcome())["state"] == "none"
        peers.show(PublicState.TRAINING)
        peers.stop_pairing()
        await peers.stop()
        store.close()

    run(work())
