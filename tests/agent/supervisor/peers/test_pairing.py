"""Pairing as the supervisor runs it, with the real processes: codes, outcomes, one at a time, all written down."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from port_agent.peers.fleet.paired import PairedDeviceError
from port_agent.peers.pairing.code import read_code
from port_agent.peers.pairing.protocol import NewPartner, PairingPlace
from port_agent.supervisor.peers import pairing
from port_agent.supervisor.peers.pairing import PairingDesk, PairingRefusedError

pytestmark = pytest.mark.process

PATIENCE_S = 120.0


@dataclass
class Desk:
    """A device's desk, whom it paired with, and what it wrote down."""

    root: Path
    partners: list[NewPartner] = field(default_factory=list)
    audits: list[str] = field(default_factory=list)
    refusal: str = ""

    def __post_init__(self) -> None:
        self.root.mkdir()
        self.place = PairingPlace(str(self.root), self.root.name, 9478)
        self.desk = PairingDesk(self.take, self.audits.append)

    def take(self, partner: NewPartner) -> str:
        if self.refusal:
            raise PairedDeviceError(self.refusal)
        self.partners.append(partner)
        return partner.name


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))


async def settled(desk: PairingDesk) -> dict[str, Any]:
    outcome: dict[str, Any] = {"state": "shown"}
    while outcome["state"] == "shown":
        outcome = await desk.outcome(PATIENCE_S)
    return outcome


def test_two_devices_pair_after_a_wrong_code(tmp_path: Path) -> None:
    async def work() -> None:
        attic, cellar = Desk(tmp_path / "attic"), Desk(tmp_path / "cellar")
        assert await attic.desk.outcome(0.0) == {"state": "none"} and not attic.desk.shows_code
        shown = await attic.desk.show(attic.place, 0, 60.0)
        code, port = str(shown["code"]), int(str(shown["port"]))
        with pytest.raises(PairingRefusedError, match="a pairing is in progress"):
            await attic.desk.show(attic.place, 0, 60.0)
        wrong = f"{(int(read_code(code)) + 10) % 10**9:09d}"
        with pytest.raises(PairingRefusedError):
            await cellar.desk.join(cellar.place, wrong, ("127.0.0.1",), port)
        name, address = await cellar.desk.join(cellar.place, read_code(code), ("127.0.0.1",), port)
        assert (name, address) == ("attic", "127.0.0.1") and await settled(attic.desk) == {
            "state": "paired",
            "name": "cellar",
        }
        (one,), (other,) = attic.partners, cellar.partners
        assert one.address == other.address == ("127.0.0.1", 9478) and one.certificate != other.certificate
        assert attic.audits[0].startswith("a pairing code is shown for 1")
        assert attic.audits[-1] == "paired with cellar at 127.0.0.1"
        assert cellar.audits[-1] == "paired with attic at 127.0.0.1"
        await attic.desk.close()
        assert not attic.desk.shows_code and all(code not in text for text in attic.audits), "no code is written down"

    run(work())


def test_a_device_that_cannot_be_kept_ends_the_pairing(tmp_path: Path) -> None:
    async def work() -> None:
        attic, cellar = Desk(tmp_path / "attic", refusal="100 devices are paired"), Desk(tmp_path / "cellar")
        shown = await attic.desk.show(attic.place, 0, 60.0)
        port = int(str(shown["port"]))
        await cellar.desk.join(cellar.place, read_code(str(shown["code"])), ("127.0.0.1",), port)
        reason = "cellar knows the code but was not paired: 100 devices are paired"
        assert await settled(attic.desk) == {"state": "failed", "reason": reason} and attic.audits[-1] == reason
        await attic.desk.close()

    run(work())


def test_a_code_that_nobody_types_and_one_that_is_taken_back(tmp_path: Path) -> None:
    async def work() -> None:
        attic = Desk(tmp_path / "attic")
        ended: list[None] = []
        attic.desk.on_end = lambda: ended.append(None)
        await attic.desk.show(attic.place, 0, 0.2)
        assert "nobody typed" in (await settled(attic.desk))["reason"]
        await until_free(attic.desk)
        await attic.desk.show(attic.place, 0, 60.0)
        attic.desk.stop()
        assert (await settled(attic.desk))["reason"] == "stopped" and len(ended) == 2
        await until_free(attic.desk)
        await attic.desk.close()

    run(work())


async def until_free(desk: PairingDesk) -> None:
    assert desk._helper is not None
    await desk._helper.close()


def test_a_port_that_is_taken_and_a_process_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        one, two = Desk(tmp_path / "one"), Desk(tmp_path / "two")
        shown = await one.desk.show(one.place, 0, 60.0)
        with pytest.raises(PairingRefusedError, match="Address already in use"):
            await two.desk.show(two.place, int(str(shown["port"])), 60.0)
        await one.desk.close()
        monkeypatch.setattr(pairing, "JOIN_MODULE", "port_agent.peers.state")
        with pytest.raises(PairingRefusedError, match="the pairing process ended"):
            await two.desk.join(two.place, "1", ("127.0.0.1",), 1)
        await two.desk.close()

    run(work())
