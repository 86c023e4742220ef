"""From sensor files to the decision: health items on the way, hysteresis kept, jumps of the clock told from time."""

import asyncio
from datetime import datetime
from pathlib import Path

import pytest

from port_agent.facts import OwnUse, Power
from port_agent.facts.linux import LinuxPlatform
from port_agent.health.conditions import HealthBoard
from port_agent.policy.decide import Policy, PolicyDecision
from port_agent.supervisor.admission import Admission
from tests.agent.facts.machines import linux
from tests.agent.set_clock import SetClock
from tests.agent.supervisor.truth_table import LOOKED_AFTER_S, NIGHTS, Machine, Row, expected, line, rows

ANY_TIME = Policy(
    idle_for_s=0.0, min_pause_s=0.0, min_free_disk_bytes=0, min_free_memory_bytes=0, train_while_in_use=True
)
TEMPERATURE = "sys/class/thermal/thermal_zone0/temp"


class Watched:
    """An admission on a machine of plain files."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock, self.health = root, SetClock(), HealthBoard()
        self.admission = Admission(linux(root), self.clock, self.health, root)

    def look(self, written: int = 0, pause: str = "") -> bool:
        return asyncio.run(self._look(written, pause))

    async def _look(self, written: int, pause: str) -> bool:
        facts = await self.admission.read(ANY_TIME, OwnUse())
        decision = self.admission.judge(facts, ANY_TIME, written, pause)
        assert decision is self.admission.decision
        return decision.state.trains

    def codes(self) -> set[str]:
        return {item.code for item in self.health.items(self.clock.now + 1e6)}


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_sensors_reach_the_decision(watched: Watched) -> None:
    assert watched.look()
    facts = watched.admission.facts
    assert (facts.power, facts.temperature_c, facts.pause) == (Power.EXTERNAL, 45.0, "")
    assert not watched.look(pause="paused by you")


def test_what_one_decision_held_back_the_next_still_does(watched: Watched) -> None:
    assert watched.look()
    for celsius, trains in ((90, False), (70, False), (60, True)):  # stops above 75, goes on below 65
        (watched.root / TEMPERATURE).write_text(str(celsius * 1000))
        watched.clock.pass_time(10.0)
        assert watched.look() is trains


def test_a_sensor_that_fails_is_a_health_item_until_it_returns(watched: Watched) -> None:
    watched.look()
    assert watched.codes() == set()
    (watched.root / TEMPERATURE).write_text("warm")
    watched.look()
    assert watched.codes() == {"sensor"}  # and not "no-temperature": there is one, it is broken
    (watched.root / TEMPERATURE).write_text("50000")
    watched.look()
    assert watched.codes() == set()


def test_a_machine_without_a_thermometer_is_said(watched: Watched) -> None:
    for name in ("temp", "type"):
        (watched.root / TEMPERATURE).with_name(name).unlink()
    (watched.root / TEMPERATURE).parent.rmdir()
    watched.look()
    assert watched.codes() == {"no-temperature"}


def test_the_flash_budget_stops_and_says_so_until_the_next_day(watched: Watched) -> None:
    assert not watched.look(written=ANY_TIME.flash_write_budget_bytes_per_day)
    assert watched.codes() == {"flash-budget"}
    assert watched.look(written=0) and watched.codes() == set()


def test_time_that_passes_is_no_jump_and_a_set_clock_is_one(watched: Watched) -> None:
    assert not watched.admission.clock_jump_s()
    watched.clock.pass_time(7200.0)
    assert not watched.admission.clock_jump_s()
    watched.clock.wall += 30.0  # NTP corrects by less than a minute
    assert not watched.admission.clock_jump_s()
    watched.clock.wall -= 3600.0
    assert watched.admission.clock_jump_s() == -3600.0
    (item,) = watched.health.items(watched.clock.now)
    assert item.code == "clock-jumped" and "back" in item.text


def test_a_clock_that_was_never_set_is_said(watched: Watched) -> None:
    watched.clock.wall = 12.0
    watched.admission.clock_jump_s()
    assert watched.codes() == {"clock-unset"}
    watched.clock.wall = 1_800_000_000.0
    assert watched.admission.clock_jump_s() and watched.codes() == set()


QUIET = 1000.0
NOON = datetime(2027, 3, 3, 12, 0)


def decided(root: Path, row: Row, after_s: float) -> set[str]:
    """Return the objections to a row, so long after it began while training went on."""
    machine, clock, health = Machine(root), SetClock(), HealthBoard()
    platform = LinuxPlatform(root / "sys", root / "proc", root / "dev")
    admission = Admission(platform, clock, health, root)
    policy = Policy(windows=() if row.window == "always" else NIGHTS, min_free_disk_bytes=0)
    clock.wall = NOON.replace(hour=23).timestamp()

    async def look(pause: str = "") -> PolicyDecision:
        facts = await admission.read(policy, OwnUse())
        return admission.judge(facts, policy, 0, pause)

    async def run() -> set[str]:
        for _ in range(3):
            await look()
            clock.pass_time(QUIET)
            machine.show(Row(), 0.0)
        assert (await look()).state.trains, "else the row shows nothing"
        clock.pass_time(after_s)
        if row.window == "closed":
            clock.wall = NOON.timestamp()
        if row.clock == "unset":
            clock.wall = 4000.0
        machine.show(row, after_s)
        decision = await look("paused by you" if row.pause == "paused" else "")
        admission.close()
        return set() if decision.state.trains else set(decision.codes)

    return asyncio.run(run())


@pytest.mark.slow
def test_the_truth_table(tmp_path: Path) -> None:
    wrong, count = [], 0
    for number, row in enumerate(rows()):
        lags = row.power.startswith("pulled")
        for after_s in LOOKED_AFTER_S if lags else [LOOKED_AFTER_S[number % len(LOOKED_AFTER_S)]]:
            count += 1
            codes, right = decided(tmp_path / str(count), row, after_s), expected(row, after_s)
            print(f"{after_s:5g} s | {line(row, codes)}")
            if codes != right:
                wrong.append(f"{row} after {after_s:g} s: {codes or 'trains'} instead of {right or 'trains'}")
    assert count >= 150 and not wrong, "\n".join(wrong)
