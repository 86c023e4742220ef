"""Helper processes: asked once or again and again, in time or not, killed at any point; how each ended
is said with its last line.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable
from pathlib import Path

import msgspec
import pytest

from port_agent.system.helper_process import (
    Helper,
    HelperCommand,
    HelperError,
    ask_helper,
    helper_exit_code,
    run_helper,
    start_helper,
)
from port_agent.system.python_process import module_environment
from port_planner.base.errors import PortError
from tests.agent.system.echo import Elsewhere, Event, Said, Say

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]
EVENTS: "msgspec.json.Decoder[Event]" = msgspec.json.Decoder(Event)


def echo(*arguments: str, directory: Path | None = Path("/")) -> HelperCommand:
    environment = module_environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    return HelperCommand("tests.agent.system.echo", arguments, environment, directory=directory)


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120.0))


def test_one_that_is_asked_once_answers_with_its_output() -> None:
    upper = echo("upper")
    content = b"abc" * 100_000  # more than a pipe holds
    assert run_helper(upper, content) == content.upper()

    async def work() -> None:
        assert await ask_helper(upper, content, within_s=60.0) == content.upper()

    run(work())


def test_how_one_ended_is_said_with_its_last_line() -> None:
    failing = msgspec.json.encode(Say("the disk is full", failing=True))
    with pytest.raises(HelperError, match=r"^ended with exit code 1: the disk is full$") as raised:
        run_helper(echo(), failing)
    assert (raised.value.code, raised.value.last_line) == (1, "the disk is full")

    async def work() -> None:
        with pytest.raises(HelperError, match=r"^ended with exit code 1: the disk is full$"):
            await ask_helper(echo(), failing)

    run(work())


def test_one_that_takes_too_long_or_is_given_up_is_gone() -> None:
    sleeping = echo("sleep")
    with pytest.raises(HelperError, match=r"^did not finish within 0 s$"):
        run_helper(sleeping, within_s=0.05)

    async def work() -> None:
        with pytest.raises(HelperError, match=r"^did not finish within 0 s$"):
            await ask_helper(sleeping, within_s=0.05)
        asking = asyncio.create_task(ask_helper(sleeping))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()

    run(work())


def test_requests_are_answered_one_after_the_other_and_an_end_is_known_from_an_answer() -> None:
    helper = Helper(echo(), EVENTS)
    answers = helper.ask(Say("a", 3))
    assert [next(answers) for _ in range(4)] == [Elsewhere("/"), Said("a", False), Said("a", False), Said("a", True)]
    assert next(helper.ask(Say("b"))) == Said("b", True)
    assert list(helper.ask(Say("gone", failing=True))) == []
    assert str(helper.close()) == "ended with exit code 1: gone"


def test_one_that_is_killed_between_two_requests_answers_nothing() -> None:
    helper = Helper(echo(directory=None), EVENTS)
    assert next(helper.ask(Say("a"))) == Elsewhere(str(Path.cwd()))
    os.kill(helper.process.pid, signal.SIGKILL)
    helper.process.wait()
    assert [event for event in helper.ask(Say("b")) if event != Said("a", True)] == []
    end = helper.close()
    assert (end.code, str(end)) == (-9, "ended with exit code -9: ")


def test_events_reach_a_loop_and_its_requests_the_process() -> None:
    async def work() -> None:
        helper = await start_helper(echo(), EVENTS, Say("a"))
        assert [await helper.event(), await helper.event()] == [Elsewhere("/"), Said("a", True)]
        helper.send(Say("no more", failing=True))
        assert await helper.event() is None
        assert str(await helper.close()) == "ended with exit code 1: no more" and not helper.runs

    run(work())


def test_one_that_is_closed_early_or_says_what_is_no_event_is_ended() -> None:
    async def work() -> None:
        sleeping = await start_helper(echo("sleep"), EVENTS, Say("a"))
        assert sleeping.runs
        assert (await sleeping.close()).code == -signal.SIGKILL
        sleeping.kill()  # once more does nothing
        junk = await start_helper(echo("junk"), EVENTS, Say("a"))
        assert await junk.event() is None
        await junk.close()

    run(work())


def test_its_memory_is_bounded() -> None:
    bomb = HelperCommand("tests.agent.system.bomb", data_bytes=256 << 20)
    assert bomb.words[-3:] == ("-P", "-m", "tests.agent.system.bomb") and str(256 << 20) in bomb.words


def test_errors_of_ours_and_of_the_system_are_a_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: Exception) -> None:
        raise error

    assert helper_exit_code(lambda: None) == 0
    assert helper_exit_code(lambda: fail(PortError("not a valid bundle"))) == 1
    assert helper_exit_code(lambda: Path("/nowhere/at/all").read_bytes()) == 1
    assert capsys.readouterr().err == "not a valid bundle\n[Errno 2] No such file or directory: '/nowhere/at/all'\n"
    with pytest.raises(KeyError):
        helper_exit_code(lambda: fail(KeyError()))
