"""From sensor files to the decision: health items on the way, hysteresis kept, jumps of the clock told from time."""

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from port_agent.facts import Answer, IdleSignal, OwnUse, Power, SensorThread
from port_agent.facts.linux import LinuxPlatform
from port_agent.facts.sysfs import Tree
from port_agent.health.conditions import HealthBoard
from port_agent.policy.decide import Policy, PolicyDecision, device_in_use
from port_agent.supervisor.admission import Admission
from tests.agent.facts.machines import hang, linux
from tests.agent.set_clock import SetClock
from tests.agent.supervisor.truth_table import LOOKED_AFTER_S, NIGHTS, Machine, Row, expected, line, rows
from tests.agent.trees import LAPTOP_BATTERY, MAINS, write_tree
from tests.waiting import until

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


def test_where_nothing_can_be_read_no_setting_trains_but_one_for_each_sensor(watched: Watched) -> None:
    """Too many files hang: the user's word stands for the plug, and for nothing else."""

    async def read(*arguments: object) -> None:
        return None

    watched.admission._sensors.read = read  # type: ignore[method-assign,assignment]
    policy = replace(ANY_TIME, assume_power=Power.EXTERNAL)
    for field, value in (("max_temperature_c", 120.0), ("stop_when_throttled", False)):
        facts = asyncio.run(watched.admission.read(policy, OwnUse()))
        assert not watched.admission.judge(facts, policy, 0, "").state.trains
        policy = replace(policy, **{field: value})  # type: ignore[arg-type]
    assert watched.admission.judge(facts, policy, 0, "").state.trains


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


def test_whoever_woke_the_machine_is_there_for_a_minute(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.look()
    assert not watched.admission.slept_s()
    watched.clock.slept, watched.clock.wall = 25_000.0, watched.clock.wall + 25_000.0
    assert watched.admission.slept_s() == 25_000.0 and not watched.admission.clock_jump_s()
    watched.clock.pass_time(5.0)
    watched.look()
    assert watched.admission.facts.idle_signals[-1] == IdleSignal("wake", Answer.NO, "woke from sleep 5 s ago")
    assert device_in_use(watched.admission.facts.idle_signals) is Answer.YES
    watched.clock.pass_time(60.0)
    watched.look()
    assert not watched.admission.slept_s() and all(
        signal.name != "wake" for signal in watched.admission.facts.idle_signals
    )


def test_a_clock_that_was_never_set_is_said(watched: Watched) -> None:
    watched.clock.wall = 12.0
    watched.admission.clock_jump_s()
    assert watched.codes() == {"clock-unset"}
    watched.clock.wall = 1_800_000_000.0
    assert watched.admission.clock_jump_s() and watched.codes() == set()


QUIET = 1000.0
NOON = datetime(2027, 3, 3, 12, 0)
DEADLINE_S = 0.2


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


SUPPLIES = "sys/class/power_supply"


def vanish(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.gone"))


def refuse(path: Path) -> None:
    """Put something in its place that nobody can list or read, root neither."""
    vanish(path)
    path.symlink_to(path.name)


def lie(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text)

    return write


KINDS = [
    ("hangs: the thermometer", TEMPERATURE, hang, "unreadable", "temperature"),
    ("hangs: the plug", f"{SUPPLIES}/ACAD/uevent", hang, "power", "power/ACAD"),
    ("hangs: the battery", f"{SUPPLIES}/BAT0/uevent", hang, "", "power/BAT0"),
    ("hangs: the load", "proc/stat", hang, "unreadable", "cpu load"),
    ("hangs: the memory", "proc/meminfo", hang, "unreadable", "memory"),
    ("hangs: the mouse", "sys/devices/usb1/1-1/urbnum", hang, "unreadable", "input/event0"),
    ("vanishes: the thermometer", TEMPERATURE, vanish, "unreadable", "temperature"),
    ("vanishes: all supplies", SUPPLIES, vanish, "power", ""),
    ("vanishes: the load", "proc/stat", vanish, "unreadable", "cpu load"),
    ("vanishes: the memory", "proc/meminfo", vanish, "unreadable", "memory"),
    ("refuses: the supplies", SUPPLIES, refuse, "power", "power"),
    ("refuses: the terminals", "dev/pts", refuse, "unreadable", "terminals"),
    ("refuses: the input devices", "sys/class/input", refuse, "unreadable", "input"),
    ("refuses: the disk", "state", refuse, "unreadable", "disk"),
    ("lies: -256 degrees", TEMPERATURE, lie("-256000"), "unreadable", "temperature"),
    ("lies: 200 degrees", TEMPERATURE, lie("200000"), "unreadable", "temperature"),
    ("lies: words for degrees", TEMPERATURE, lie("warm"), "unreadable", "temperature"),
    ("lies: a plug of 7", f"{SUPPLIES}/ACAD/uevent", lie(MAINS.format(online=7)), "power", "power/ACAD"),
    (
        "lies: a battery of 101 %",
        f"{SUPPLIES}/BAT0/uevent",
        lie(LAPTOP_BATTERY.format(status="Full", capacity=101)),
        "",
        "",
    ),
    ("lies: memory in words", "proc/meminfo", lie("MemAvailable: much\n"), "unreadable", "memory"),
    ("lies: a load that stands still", "proc/stat", lambda place: None, "unreadable", "cpu load"),
    ("lies: a load in words", "proc/stat", lie("cpu  a b c d e f\n"), "unreadable", "cpu load"),
]


NEEDED_BY_NONE = ("class/net", "pressure/memory", "BAT0", "thermal_zone0/type")
"""What may fail beside mains that are online: network, memory's pressure, the battery; a zone of
unknown kind counts anyway.
"""


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE])
def test_whatever_cannot_be_read_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Every file and folder that is asked for while training goes on fails alone; the answer is not to be a default."""
    asked, harmed = Tree.ask, set[Path]()
    seen: dict[Path, None] = {}

    def ask(tree: Tree, path: Path, read: Callable[[], object]) -> object:
        seen[path] = None
        if path in harmed:
            raise OSError(error, os.strerror(error))
        return asked(tree, path, read)

    monkeypatch.setattr(Tree, "ask", ask)
    machine, clock = Machine(tmp_path), SetClock()
    write_tree(tmp_path / "sys", {"class/hwmon/hwmon0/name": "coretemp", "class/hwmon/hwmon0/temp1_input": "40000"})
    write_tree(
        tmp_path / "sys",
        {"class/net/eth0/operstate": "up", "bus/pci/drivers/nvidia/0000:01:00.0/power/runtime_status": "suspended"},
    )
    write_tree(tmp_path / "sys", {"devices/platform/soc/soc:firmware/get_throttled": "0"})
    write_tree(tmp_path / "proc/pressure", dict.fromkeys(("cpu", "io"), "some avg10=0.00"))
    write_tree(tmp_path / "dev", {"tty": "", "ttyS0": "", "nvidia0": "", "shm/port-agent-session-1": ""})
    os.utime(tmp_path / "dev/ttyS0", (1.0, 1.0))
    os.utime(tmp_path / "dev/shm/port-agent-session-1", (1.0, 1.0))
    (tmp_path / "state").mkdir()

    async def trains(then_harmed: Path | None = None) -> bool:
        platform = LinuxPlatform(tmp_path / "sys", tmp_path / "proc", tmp_path / "dev")
        admission = Admission(platform, clock, HealthBoard(), tmp_path / "state")
        admission._sensors = SensorThread(60.0)  # nothing hangs here
        harmed.clear()
        for _ in range(4):
            clock.pass_time(QUIET)
            machine.show(Row(), 0.0)
            decision = admission.judge(await admission.read(Policy(), OwnUse()), Policy(), 0, "")
            if decision.state.trains and then_harmed is not None:
                harmed.add(then_harmed)
        admission.close()
        return decision.state.trains

    assert asyncio.run(trains())
    asked_for = [path for path in seen if path.exists() and not any(part in str(path) for part in NEEDED_BY_NONE)]
    assert len(asked_for) > 25
    assert [str(path.relative_to(tmp_path)) for path in asked_for if asyncio.run(trains(path))] == []


@pytest.mark.parametrize(
    ("place", "harm", "code", "sensor"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS]
)
def test_a_sensor_that_hangs_vanishes_or_lies(
    tmp_path: Path, place: str, harm: Callable[[Path], Callable[[], None] | None], code: str, sensor: str
) -> None:
    """`code` is the objection, none where the others know enough; `sensor` is named as a fault."""
    asyncio.run(_harm(tmp_path, tmp_path / place, harm, code, sensor))


async def _harm(
    root: Path, place: Path, harm: Callable[[Path], Callable[[], None] | None], code: str, sensor: str
) -> None:
    machine, clock = Machine(root), SetClock()
    (root / "state").mkdir()
    admission = Admission(
        LinuxPlatform(root / "sys", root / "proc", root / "dev"), clock, HealthBoard(), root / "state"
    )
    admission._sensors = SensorThread(DEADLINE_S)

    async def look() -> PolicyDecision:
        async with asyncio.timeout(60.0):
            facts = await admission.read(Policy(), OwnUse())
        return admission.judge(facts, Policy(), 0, "")

    for _ in range(3):
        await look()
        clock.pass_time(QUIET)
        machine.show(Row(), 0.0)
    assert (await look()).state.trains
    if place.name != "stat":
        machine.run_processors(busy=10)
    let_go = harm(place)
    clock.pass_time(1.0)
    decision = await look()
    assert decision.state.trains is (code == "") and (decision.codes == (code,) or not code), decision.reasons
    assert not sensor or sensor in {fault.sensor for fault in admission.facts.faults}
    assert not code or not sensor or sensor.split("/")[-1] in decision.reasons[0]
    if let_go is not None:
        let_go()
        until(lambda: not admission.platform.tree.silent)
    admission.close()
