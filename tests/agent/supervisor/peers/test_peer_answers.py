"""What paired devices are answered: only what the owner allows, only while the policy does, never two at once."""

import asyncio
import struct
import zlib
from collections.abc import Awaitable
from pathlib import Path

import pytest

from port_agent.peers.exchange.answers import NotAnsweredError, PeerClient, Topic
from port_agent.policy.config import AgentOptions
from port_agent.supervisor.peers import peer_answers as answers_module
from port_agent.supervisor.peers.peer_answers import LONGEST_SOLVING_S, PeerAnswers
from tests.agent.live_daemon import until

NAME = "ab" * 32
ALLOWED = AgentOptions(share_with_peers=True, solve_for_peers=True)
SLEEPER = "tests.agent.supervisor.peers.sleeping_solver"
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve by a process that only sleeps, and look often whether it may."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(answers_module, "SOLVER_MODULE", SLEEPER)
    monkeypatch.setattr(answers_module, "_WATCH_S", 0.05)


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120.0))


async def nothing_moves(client: PeerClient, request: bytes) -> bytes:
    return b""


def introduce_nobody(client: PeerClient) -> bytes:
    raise OSError(5, "Input/output error", "/var/lib/port-agent/paired/X.json")


class Home:
    """Answers, and what is in the way of solving."""

    def __init__(self, root: Path, options: AgentOptions = ALLOWED) -> None:
        self.objection = ""
        self.audits: list[str] = []
        self.answers = PeerAnswers(
            root, lambda: self.objection, self.audits.append, self.federate, nothing_moves, introduce_nobody
        )
        self.answers.options = options

    async def federate(self, client: PeerClient, request: bytes) -> bytes:
        return client.name.encode() + request


def is_solving(home: Home) -> bool:
    """Return whether a second problem would be refused for the sake of a first."""
    try:
        home.answers.check_solving()
    except NotAnsweredError as error:
        return "it is solving for" in str(error)
    return False


def test_nothing_unless_allowed(tmp_path: Path) -> None:
    async def work() -> None:
        home = Home(tmp_path, AgentOptions())
        with pytest.raises(NotAnsweredError, match="it shares nothing"):
            await home.answers.shared(Topic.PLAN, NAME)
        with pytest.raises(NotAnsweredError, match="set share = true"):
            await home.answers.keep(Topic.PLAN, NAME, b"a plan")
        with pytest.raises(NotAnsweredError, match="it solves for no other device"):
            await home.answers.solve("cellar", b"a problem", 1.0)
        assert home.audits == []

    run(work())


def test_what_is_kept_is_shared(tmp_path: Path) -> None:
    async def work() -> None:
        home = Home(tmp_path)
        await home.answers.keep(Topic.PLAN, NAME, b"a plan")
        assert await home.answers.shared(Topic.PLAN, NAME) == b"a plan"
        with pytest.raises(NotAnsweredError, match="it has no such costs"):
            await home.answers.shared(Topic.COSTS, NAME)

    run(work())


@pytest.mark.process
@pytest.mark.usefixtures("sleeper")
def test_the_policy_refuses_with_its_reason_and_stops_what_runs(tmp_path: Path) -> None:
    async def work() -> None:
        home = Home(tmp_path)
        home.objection = "on battery 64 %"
        with pytest.raises(NotAnsweredError, match=r"^on battery 64 %$"):
            await home.answers.solve("cellar", b"a problem", 1.0)
        home.objection = ""
        solving = asyncio.create_task(home.answers.solve("cellar", b"a problem", 1.0))
        await until(lambda: is_solving(home))
        with pytest.raises(NotAnsweredError, match="it is solving for cellar"):
            await home.answers.solve("loft", b"a problem", 1.0)
        home.objection = "somebody uses the device"
        with pytest.raises(NotAnsweredError, match="stopped: somebody uses the device"):
            await solving
        assert home.audits[-1].startswith("cellar: a plan to solve (9 B): stopped: somebody uses the device, after ")

    run(work())


@pytest.mark.process
@pytest.mark.usefixtures("sleeper")
def test_time_is_bounded_and_nobody_waits_for_what_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_module, "solving_patience_s", lambda seconds: seconds)

    async def work() -> None:
        home = Home(tmp_path)
        with pytest.raises(NotAnsweredError, match="solves for at most 10 min 00 s, not"):
            await home.answers.solve("cellar", b"a problem", LONGEST_SOLVING_S + 1)
        with pytest.raises(NotAnsweredError, match="stopped: not solved within"):
            await home.answers.solve("cellar", b"a problem", 0.2)
        solving = asyncio.create_task(home.answers.solve("cellar", b"a problem", 60.0))
        await until(lambda: is_solving(home))
        solving.cancel()
        await until(solving.done)
        assert "abandoned: nobody waits for it any longer" in home.audits[-1]
        home.answers.check_solving()

    run(work())


@pytest.mark.process
def test_a_solver_that_fails_says_so(tmp_path: Path) -> None:
    async def work() -> None:
        home = Home(tmp_path)
        with pytest.raises(NotAnsweredError, match="solving ended with exit code 2: not a planning problem"):
            await home.answers.solve("cellar", b"no problem", 1.0)
        home.answers.check_solving()

    run(work())


@pytest.mark.process
def test_a_bomb_ends_its_solver_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver has the lowest priority: beside others, it may reach its limit of memory after that of its time."""
    monkeypatch.setattr(answers_module, "solving_patience_s", lambda seconds: 100.0)
    many = 30_000_000
    raw = b"\x98\x01\xdd" + struct.pack(">I", many) + b"\x91\xc0" * many

    async def work() -> None:
        home = Home(tmp_path)
        with pytest.raises(NotAnsweredError, match="solving ended with exit code 1: MemoryError"):
            await home.answers.solve("cellar", zlib.compress(raw, 9), 1.0)
        assert "MemoryError" in home.audits[-1]

    run(work())


def test_a_folder_that_fails_introduces_nobody_and_names_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NotAnsweredError, match=r"^Input/output error$"):
        asyncio.run(Home(tmp_path).answers.introduce(PeerClient("attic", "AT-TIC")))
