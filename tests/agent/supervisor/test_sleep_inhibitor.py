"""When sleep is held off, and that whatever ends gives it back."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.facts import Answer, Facts, IdleSignal, Power
from port_agent.policy.decide import Memory, Policy, PolicyDecision, State
from port_agent.supervisor.sleep_inhibitor import Inhibition, SleepInhibitor, inhibition, sleep_text
from tests.agent.facts.machines import fake_program
from tests.agent.live_daemon import process_state, until

POLICY = Policy()
ALONE = Facts(Power.EXTERNAL, idle_signals=(IdleSignal("input", Answer.YES, ""),))
USED = replace(ALONE, idle_signals=(IdleSignal("input", Answer.NO, ""),))


def decision(state: State, *codes: str) -> PolicyDecision:
    return PolicyDecision(state, codes, codes, Memory())


TRAINS, GENTLY = decision(State.TRAIN, "go"), decision(State.TRAIN_GENTLY, "gently")


@pytest.mark.parametrize(
    ("decided", "facts", "policy", "has_work", "expected"),
    [
        (TRAINS, ALONE, POLICY, True, Inhibition.SLEEP),
        (GENTLY, USED, POLICY, True, Inhibition.IDLE),
        (TRAINS, replace(ALONE, idle_signals=()), POLICY, True, Inhibition.IDLE),
        (TRAINS, replace(ALONE, power=Power.ASSUMED), POLICY, True, Inhibition.SLEEP),
        (TRAINS, ALONE, POLICY, False, None),
        (TRAINS, ALONE, replace(POLICY, keep_awake=False), True, None),
        (TRAINS, replace(ALONE, power=Power.BATTERY), POLICY, True, None),
        (TRAINS, replace(ALONE, power=Power.UNKNOWN), POLICY, True, None),
        (TRAINS, replace(ALONE, power=Power.UNKNOWN), replace(POLICY, assume_power=Power.EXTERNAL), True, Inhibition.SLEEP),
        (TRAINS, ALONE, replace(POLICY, assume_power=Power.BATTERY), True, None),
        (decision(State.LEAVE, "hot"), ALONE, POLICY, True, Inhibition.SLEEP),
        (decision(State.LEAVE, "settling"), ALONE, POLICY, True, Inhibition.SLEEP),
        (decision(State.LEAVE, "hot", "window"), ALONE, POLICY, True, None),
        (decision(State.LEAVE, "in-use"), USED, POLICY, True, None),
        (decision(State.LEAVE, "user"), ALONE, POLICY, True, None),
    ],
)  # fmt: skip
def test_sleep_is_held_off_only_while_a_job_may_run_on_external_power(
    decided: PolicyDecision, facts: Facts, policy: Policy, has_work: bool, expected: Inhibition | None
) -> None:
    assert inhibition(decided, facts, policy, has_work=has_work) is expected


@asynccontextmanager
async def holding(
    command: Callable[[str], tuple[str, ...] | None], clock: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[SleepInhibitor]:
    """Run an inhibitor."""
    inhibitor = SleepInhibitor(command, clock, retry_s=60.0)
    task = asyncio.create_task(inhibitor.run())
    try:
        yield inhibitor
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def fake_inhibit(root: Path) -> Callable[[str], tuple[str, ...]]:
    """Return a program in the place of systemd-inhibit, which leaves a file by the name of what it
    holds off, its process in it.
    """
    fake_program(root, "inhibit", f'echo $$ > {root}/"$1"\nwhat=$1\nshift\n"$@"\nrm {root}/"$what"')
    return lambda what: (str(root / "inhibit"), what)


@pytest.mark.process
def test_what_is_wanted_is_held_and_given_back(tmp_path: Path) -> None:
    async def hold() -> None:
        async with holding(fake_inhibit(tmp_path)) as inhibitor:
            assert sleep_text(inhibitor, POLICY) == "not held off: no job may run"
            inhibitor.want(Inhibition.SLEEP)
            await until(lambda: inhibitor.held is Inhibition.SLEEP)
            assert (tmp_path / "sleep").exists() and sleep_text(inhibitor, POLICY) == "held off while a job may run"
            inhibitor.want(Inhibition.IDLE)
            await until(lambda: inhibitor.held is Inhibition.IDLE)
            assert (tmp_path / "idle").exists() and not (tmp_path / "sleep").exists()
            inhibitor.want(None)
            await until(lambda: not (tmp_path / "idle").exists())
            inhibitor.want(Inhibition.SLEEP)
            await until(lambda: inhibitor.held is Inhibition.SLEEP)
        assert not (tmp_path / "sleep").exists(), "the end of the agent gives it back"

    asyncio.run(hold())


@pytest.mark.process
def test_a_holder_that_was_killed_is_started_again(tmp_path: Path) -> None:
    async def hold() -> None:
        async with holding(fake_inhibit(tmp_path)) as inhibitor:
            inhibitor.want(Inhibition.SLEEP)
            await until(lambda: inhibitor.held is Inhibition.SLEEP)
            first = int((tmp_path / "sleep").read_text())
            os.kill(first, signal.SIGKILL)

            def again() -> bool:
                inhibitor.want(Inhibition.SLEEP)
                return int((tmp_path / "sleep").read_text() or first) != first

            await until(again)
            await until(lambda: inhibitor.held is Inhibition.SLEEP)

    asyncio.run(hold())


@pytest.mark.process
def test_an_agent_that_is_killed_holds_nothing_off(tmp_path: Path) -> None:
    """The pipe to the holder ends with whoever holds it."""

    async def kill() -> None:
        command = fake_inhibit(tmp_path)("sleep")
        agent = (
            f"import subprocess, time; subprocess.Popen({[*command, 'cat']!r}, stdin=subprocess.PIPE); time.sleep(600)"
        )
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", agent)
        await until(lambda: (tmp_path / "sleep").exists() and bool((tmp_path / "sleep").read_text()))
        holder = int((tmp_path / "sleep").read_text())
        process.kill()
        await process.wait()
        await until(lambda: process_state(holder) in ("", "Z"))

    asyncio.run(kill())


@pytest.mark.process
def test_a_refusal_is_said_and_tried_again_later(tmp_path: Path) -> None:
    fake_program(tmp_path, "inhibit", f"echo x >> {tmp_path}/asked\necho Failed to inhibit: Access denied >&2\nexit 1")
    now = [0.0]

    async def hold() -> None:
        def asked() -> int:
            return len((tmp_path / "asked").read_text().split())

        async with holding(lambda what: (str(tmp_path / "inhibit"), what), lambda: now[0]) as inhibitor:
            inhibitor.want(Inhibition.SLEEP)
            await until(lambda: inhibitor.trouble != "")
            assert inhibitor.held is None
            assert sleep_text(inhibitor, POLICY) == "not held off: Failed to inhibit: Access denied"
            for _ in range(100):
                inhibitor.want(Inhibition.SLEEP)
                await asyncio.sleep(0)
            assert asked() == 1
            now[0] = 60.0
            inhibitor.want(Inhibition.SLEEP)
            await until(lambda: asked() == 2)
            inhibitor.want(None)
            await until(lambda: inhibitor.trouble == "")

    asyncio.run(hold())


def test_without_a_program_for_it_that_is_said() -> None:
    async def hold() -> None:
        async with holding(lambda what: None) as inhibitor:
            inhibitor.want(Inhibition.SLEEP)
            await until(lambda: inhibitor.trouble != "")
            assert "systemd-inhibit does not exist" in sleep_text(inhibitor, POLICY)

    asyncio.run(hold())


def test_off_by_configuration_is_said() -> None:
    inhibitor = SleepInhibitor(lambda what: None, lambda: 0.0)
    assert "when.keep_awake = false" in sleep_text(inhibitor, replace(POLICY, keep_awake=False))


@pytest.mark.process
@pytest.mark.skipif(shutil.which("systemd-inhibit") is None, reason="systemd-inhibit does not exist here")
def test_systemd_inhibit_itself_takes_these_words(tmp_path: Path) -> None:
    """Without a logind it refuses, after it has understood what it was told."""
    from port_agent.facts.linux import LinuxPlatform

    async def ask() -> str:
        command = LinuxPlatform().awake_command("sleep") or ()
        process = await asyncio.create_subprocess_exec(
            *command,
            "true",
            env={**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={tmp_path}/nobody"},
            stderr=asyncio.subprocess.PIPE,
        )
        return (await process.communicate())[1].decode()

    assert "Failed to connect" in asyncio.run(ask())
