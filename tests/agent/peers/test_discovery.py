"""Real multicast DNS between real agents: they see each other, they see a state change, they see one leave."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from zeroconf import DNSCache, DNSRecord, DNSText, current_time_millis
from zeroconf.asyncio import AsyncZeroconf

from port_agent.cli import main
from port_agent.control.client import ControlClient, ControlError
from port_agent.peers import discovery
from port_agent.peers.announcement import Announcement
from port_agent.peers.discovery import Discovery
from port_agent.peers.interfaces import Interface
from port_agent.peers.sightings import Sightings
from port_agent.peers.state import PublicState
from tests.agent.live_daemon import LONG, daemon
from tests.agent.live_daemon import until as eventually
from tests.agent.peers.networks import ROOT, agent_in, cable
from tests.waiting import until

ON = '[peers]\ndiscover = true\nname = "{name}"\n'
DOCTOR_S = 600.0
"""It asks torch and sensors, as the command waits for it."""
HOSTILE = ROOT / "tests/agent/peers/hostile.py"


def peers(client: ControlClient) -> list[dict[str, Any]]:
    """Return an agent's peers; an agent that still starts has none."""
    try:
        found: list[dict[str, Any]] = client.get("/v1/status")["peers"]
    except ControlError:
        return []
    return found


def seen(client: ControlClient) -> dict[str, str]:
    return {peer["name"]: peer["state"] for peer in peers(client)}


def doctor(client: ControlClient) -> tuple[str, str]:
    """Return the doctor's verdict and finding on discovery."""
    patient = ControlClient(client.path.parent, DOCTOR_S)
    checks = patient.post("/v1/doctor", flash=False)["checks"]
    (check,) = [check for check in checks if check["name"] == "discovery of peers"]
    return check["verdict"], check["finding"]


@pytest.mark.root
@pytest.mark.long
def test_two_agents_on_one_cable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        cable() as (left, right),
        agent_in(left, tmp_path / "left", ON.format(name="attic")) as (attic, _),
        agent_in(right, tmp_path / "right", ON.format(name="cellar")) as (cellar, process),
    ):
        until(lambda: seen(attic) == {"cellar": "idle"} and seen(cellar) == {"attic": "idle"})
        (other,) = peers(attic)
        assert other["address"] == "10.77.0.2" and other["last_seen_s"] < 60
        assert other["id"] == cellar.get("/v1/peers")["id"]

        bundle = tmp_path / "long.json"
        bundle.write_text(json.dumps(LONG))
        upload = cellar.upload("/v1/uploads", bundle)["upload"]
        cellar.post("/v1/jobs", kind="train", name="secret-job", upload=upload)
        until(lambda: seen(attic) == {"cellar": "training"})
        assert "secret" not in json.dumps(peers(attic))

        place = ["--runtime-dir", str(tmp_path / "left/run")]
        assert main(["peers", *place]) == 0 and main(["status", *place]) == 0
        shown = capsys.readouterr().out
        assert "10.77.0.2" in shown and "announced on wire" in shown and "cellar training" in shown
        assert doctor(attic) == ("good", "on; wire: works")

        config = tmp_path / "right/config.toml"
        config.write_text(config.read_text().replace("discover = true", "discover = false"))
        cellar.post("/v1/reload")
        assert cellar.get("/v1/status")["peers"] is None and doctor(cellar)[1].startswith("off")
        until(lambda: "cellar" not in seen(attic))
        config.write_text(config.read_text().replace("discover = false", "discover = true"))
        cellar.post("/v1/reload")
        until(lambda: "cellar" in seen(attic))
        hostile = subprocess.run(
            ["ip", "netns", "exec", right, sys.executable, str(HOSTILE), "10.77.0.2"],
            capture_output=True,
            text=True,
        )
        assert hostile.returncode == 0, hostile.stderr
        until(lambda: any(peer["id"] == "bad0bad0bad0" for peer in peers(attic)))
        (evil,) = [peer for peer in peers(attic) if peer["id"] == "bad0bad0bad0"]
        assert evil["name"].isprintable() and len(evil["name"]) <= 40 and evil["state"] == "unknown"
        assert main(["peers", *place]) == 0
        assert "\x1b[31" not in capsys.readouterr().out and len(peers(attic)) <= 100

        process.terminate()
        process.wait(60.0)
        until(lambda: "cellar" not in seen(attic))


@pytest.mark.process
def test_off_means_no_zeroconf_and_no_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with daemon(tmp_path) as client:
        assert client.get("/v1/status")["peers"] is None
        assert client.get("/v1/peers")["discover"] is False
        maps = Path(f"/proc/{client_pid(tmp_path)}/maps")
        if maps.exists():
            assert "/zeroconf/" not in maps.read_text() and "/torch/" not in maps.read_text()
        assert main(["peers", "--runtime-dir", str(tmp_path / "run")]) == 0
        assert "discovery is off" in capsys.readouterr().out
    assert not (tmp_path / "state/identity.pem").exists()


def client_pid(root: Path) -> int:
    """Return the process id that the daemon wrote into its lock."""
    return int((root / "state/port-agent.lock").read_text())


OWN = Announcement("0123456789ab", "attic", "board", "1", PublicState.IDLE)


async def nowhere(addresses: tuple[str, ...], port: int) -> str:
    return ""


@pytest.mark.slow
def test_two_in_one_process_over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greeting, change of state, the next question's answer, goodbye: the same packets, without a network."""
    monkeypatch.setattr(discovery, "multicast_interfaces", lambda: (Interface("lo", 1, "127.0.0.1", False),))
    monkeypatch.setattr(discovery, "ANNOUNCE_EVERY_S", 0.05)
    first = Discovery(OWN, lambda text: None, nowhere)
    second = Discovery(replace(OWN, id="ba9876543210", name="cellar"), lambda text: None, nowhere)

    def sees(state: PublicState) -> bool:
        return [peer.announcement for peer in first.peers(time.monotonic())] == [replace(second.own, state=state)]

    async def run() -> None:
        tasks = [asyncio.create_task(one.run()) for one in (first, second)]
        await eventually(lambda: sees(PublicState.IDLE) and len(second.peers(time.monotonic())) == 1)
        assert first.peers(time.monotonic())[0].addresses == ("127.0.0.1",)
        second.show(PublicState.TRAINING)
        await eventually(lambda: sees(PublicState.TRAINING))
        tasks[1].cancel()
        await eventually(lambda: not first.peers(time.monotonic()))
        tasks[0].cancel()
        await asyncio.wait(tasks)

    asyncio.run(run())


@pytest.mark.slow
def test_an_answer_that_waits_its_turn_does_not_follow_the_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "multicast_interfaces", lambda: (Interface("lo", 1, "127.0.0.1", False),))
    nodes: list[AsyncZeroconf] = []

    def made(**options: Any) -> AsyncZeroconf:
        nodes.append(AsyncZeroconf(**options))
        return nodes[-1]

    monkeypatch.setattr(discovery, "AsyncZeroconf", made)
    first = Discovery(OWN, lambda text: None, nowhere)
    second = Discovery(replace(OWN, id="ba9876543210", name="cellar"), lambda text: None, nowhere)
    third = Discovery(replace(OWN, id="ba0123456789", name="shed"), lambda text: None, nowhere)

    async def run() -> None:
        tasks = [asyncio.create_task(one.run()) for one in (first, second)]
        await eventually(lambda: len(first.peers(time.monotonic())) == len(second.peers(time.monotonic())) == 1)
        for node in nodes:
            for info in node.zeroconf.registry.async_get_service_infos():
                if second.own.id in info.name:  # as if somebody had asked just now
                    answers: dict[DNSRecord, set[DNSRecord]] = {
                        info.dns_pointer(): {info.dns_text(), info.dns_service()}
                    }
                    node.zeroconf.out_queue.async_add(current_time_millis(), answers)
        tasks[1].cancel()
        await eventually(lambda: not first.peers(time.monotonic()))
        await asyncio.wait({tasks[1]})
        tasks.append(asyncio.create_task(third.run()))  # what was sent before its first packet is heard before that
        await eventually(lambda: third.own.id in [peer.announcement.id for peer in first.peers(time.monotonic())])
        assert [peer.announcement.id for peer in first.peers(time.monotonic())] == [third.own.id]
        tasks[0].cancel()
        tasks[2].cancel()
        await asyncio.wait(tasks)

    asyncio.run(run())


@pytest.mark.slow
def test_a_copied_state_directory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "multicast_interfaces", lambda: (Interface("lo", 1, "127.0.0.1", False),))
    ready: list[str] = []
    reports: list[str] = []
    asked: list[tuple[tuple[str, ...], int]] = []

    async def there(addresses: tuple[str, ...], port: int) -> str:
        asked.append((addresses, port))
        return "10.0.0.5"

    async def run() -> None:
        first = Discovery(OWN, ready.append, nowhere)
        first.listens(port=9478, pairing_port=0)
        copy = Discovery(replace(OWN, name="copy"), reports.append, there)
        tasks = [asyncio.create_task(first.run())]
        await eventually(lambda: bool(ready))
        tasks.append(asyncio.create_task(copy.run()))
        await eventually(lambda: bool(reports))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(run())
    assert asked == [(("127.0.0.1",), 9478)]
    assert "the device at 10.0.0.5 has this one's key" in reports[0] and "delete identity.pem there" in reports[0]


def test_nobody_is_told_to_delete_an_identity_for_a_claim() -> None:
    claim = discovery._IdTakenError(("10.0.0.5",), 9478)
    text = asyncio.run(Discovery(OWN, lambda text: None, nowhere)._judged(claim))
    assert "claims this one's id 0123456789ab" in text and "delete" not in text


def run_until_reported(monkeypatch: pytest.MonkeyPatch, interfaces: tuple[Interface, ...]) -> list[str]:
    """Return what a discovery reports first."""
    monkeypatch.setattr(discovery, "multicast_interfaces", lambda: interfaces)
    reports: list[str] = []

    async def run() -> None:
        reported = asyncio.Event()

        def report(text: str) -> None:
            reports.append(text)
            reported.set()

        task = asyncio.create_task(Discovery(OWN, report, nowhere).run())
        await asyncio.wait_for(reported.wait(), 60.0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(run())
    return reports


def test_a_socket_that_cannot_be_opened_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    (report,) = run_until_reported(monkeypatch, (Interface("lan0", 1, "127.0.0.1", False),))
    assert "Operation not permitted" in report


def test_an_interface_that_vanished_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (report,) = run_until_reported(monkeypatch, (Interface("lan0", 2**31 - 1, "fe80::1", True),))
    assert report


def test_no_network_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_until_reported(monkeypatch, ()) == [""]


def test_a_flood_of_records_is_not_kept() -> None:
    """Of other services too: zeroconf caches whatever it hears, as long as the sender says."""
    cache = DNSCache()
    ears = discovery._AnnouncementListener(SimpleNamespace(cache=cache), Sightings("0" * 16), lambda: None)  # type: ignore[arg-type]
    most = 0
    for packet in range(200):
        names = (f"host-{packet}-{number}._printer._tcp.local." for number in range(50))
        cache.async_add_records([DNSText(name, 16, 1, 1 << 31, bytes(200)) for name in names])
        ears.async_update_records_complete()
        most = max(most, sum(map(len, cache.cache.values())))
    assert 50 < most <= discovery.MAX_CACHED
    assert len(cache._expirations) <= discovery.MAX_CACHED
