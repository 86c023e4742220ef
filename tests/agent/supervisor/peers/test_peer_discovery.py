"""Discovery as the supervisor runs it: switched by the configuration, visible when it fails, shown as plain values."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from port_agent.health.conditions import HealthBoard
from port_agent.peers import discovery
from port_agent.peers.announcement import Announcement
from port_agent.peers.interfaces import Interface
from port_agent.peers.sightings import Peer
from port_agent.peers.state import PublicState
from port_agent.policy.config import AgentOptions
from port_agent.supervisor.dispatch import Dispatcher
from port_agent.supervisor.peers.peer_discovery import PeerDiscovery, public_state, row
from port_agent.system.clock import SystemClock
from tests.agent.live_daemon import LONG, go
from tests.agent.live_daemon import until as eventually
from tests.agent.supervisor.parts import TRAIN, parts

ON = AgentOptions(discover_peers=True, peer_name="attic")
OFF = AgentOptions(discover_peers=False)
OTHER = Announcement("0123456789ab", "cellar", "a board", "1.2", PublicState.TRAINING)


@pytest.mark.parametrize(
    ("peer", "now_s", "address", "seen_s", "state"),
    [
        (Peer(OTHER, ("10.0.0.2", "fe80::2"), 100.0, 0.0), 130.4, "10.0.0.2", 30, "training"),
        (
            Peer(Announcement("0123456789ab", "cellar", "a board", "1.2", None), (), 100.0, 0.0),
            99.0,
            None,
            0,
            "unknown",
        ),
    ],
)
def test_another_agent_as_plain_values(peer: Peer, now_s: float, address: str | None, seen_s: int, state: str) -> None:
    assert row(peer, now_s) == {
        "name": "cellar",
        "board": "a board",
        "state": state,
        "version": "1.2",
        "address": address,
        "last_seen_s": seen_s,
        "id": "0123456789ab",
    }


@pytest.mark.process
@go
async def test_others_hear_whether_there_is_work_and_never_why_it_waits(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        runners = made.context.runners
        assert public_state(runners, has_work=False) is PublicState.IDLE
        assert public_state(runners, has_work=True) is PublicState.PAUSED
        made.add("birds", LONG)
        Dispatcher(made.context).act(TRAIN)
        assert public_state(runners, has_work=True) is PublicState.TRAINING
        runners.host.pause()
        assert public_state(runners, has_work=True) is PublicState.PAUSED


@go
async def test_switched_off_there_is_nothing_and_ending_it_costs_nothing(tmp_path: Path) -> None:
    peers = PeerDiscovery(tmp_path, HealthBoard(), SystemClock())
    peers.apply(OFF)
    peers.show(PublicState.TRAINING)
    assert peers.describe() == {"discover": False, "id": None, "name": None, "interfaces": [], "peers": None}
    await peers.stop()


@contextmanager
def loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let discovery talk to this process alone."""
    with monkeypatch.context() as patch:
        patch.setattr(discovery, "multicast_interfaces", lambda: (Interface("lo", 1, "127.0.0.1", False),))
        yield


@pytest.mark.process
def test_a_reload_that_changes_nothing_leaves_it_alone_and_a_new_name_starts_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def rename() -> None:
        peers = PeerDiscovery(tmp_path, HealthBoard(), SystemClock())
        peers.show(PublicState.TRAINING)
        peers.apply(ON)
        assert peers.rows() == [], "switched on, and nobody heard yet"
        await eventually(lambda: peers.describe()["name"] == "attic")
        first, own = peers._task, peers._discovery
        assert own is not None and own.own.state is PublicState.TRAINING, "shown from the first greeting"
        peers.apply(ON)
        assert peers._task is first
        peers.apply(AgentOptions(discover_peers=True, peer_name=""))
        await eventually(lambda: peers.describe()["name"] is not None)
        shown = peers.describe()
        assert shown["name"] == f"agent-{str(shown['id'])[:4]}", "without a name it is called by its id"
        assert first is not None and first.done(), "the goodbye of the old name comes before the greeting of the new"
        await peers.stop()

    with loopback(monkeypatch):
        asyncio.run(asyncio.wait_for(rename(), 120.0))


@pytest.mark.process
def test_a_fault_of_ours_ends_discovery_visibly_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> tuple[Interface, ...]:
        raise ZeroDivisionError("no such thing")

    monkeypatch.setattr(discovery, "multicast_interfaces", fail)
    health = HealthBoard()

    async def run() -> None:
        discovery = PeerDiscovery(tmp_path, health, SystemClock())
        fault = asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: fault.set())
        discovery.apply(AgentOptions(discover_peers=True))
        await asyncio.wait_for(fault.wait(), 60.0)
        (item,) = health.items(time.monotonic())
        assert (item.code, item.text) == ("no-discovery", "ZeroDivisionError: no such thing")
        discovery.apply(AgentOptions(discover_peers=False))
        assert not health.items(time.monotonic()) and discovery.rows() is None
        await discovery.stop()

    asyncio.run(run())


@pytest.mark.process
def test_a_state_directory_that_cannot_be_written_is_a_health_item(tmp_path: Path) -> None:
    health = HealthBoard()

    async def run() -> None:
        discovery = PeerDiscovery(tmp_path / "nowhere", health, SystemClock())
        discovery.apply(AgentOptions(discover_peers=True))
        await eventually(lambda: health.holds("no-discovery"))
        assert discovery.rows() == []
        await discovery.stop()

    asyncio.run(run())
    (item,) = health.items(time.monotonic())
    assert "device's key cannot be used" in item.text
