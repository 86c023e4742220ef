"""A pause lasts as long as was asked for, whatever happens to the clock, the machine, the file and the database."""

import math
from pathlib import Path

import pytest

from port_agent.jobs.store import StoreError
from port_agent.supervisor.pause import BY_USER, FILE_NAME, UNREADABLE, Pause
from tests.agent.set_clock import SetClock

DAY_S, YEAR_S = 86400.0, 365 * 86400.0


class Machine:
    """A clock, a state directory, and a boot that a test repeats."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock, self.boots = root, SetClock(), 0
        self.boot()

    def boot(self) -> None:
        self.boots += 1
        (self.root / "boot_id").write_text(str(self.boots))
        self.clock.now = 10.0

    def agent(self) -> Pause:
        return Pause(self.root, self.clock, self.root / "boot_id")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def paused(machine: Machine, for_s: float | None) -> Pause:
    pause = machine.agent()
    pause.begin(for_s)
    pause.flush()
    return pause


@pytest.mark.parametrize("jump_s", [-YEAR_S, -DAY_S, 0.0, DAY_S, 57 * YEAR_S])
@pytest.mark.parametrize("restarted", [False, True])
def test_an_hour_is_an_hour_whatever_is_done_to_the_clock(machine: Machine, jump_s: float, restarted: bool) -> None:
    pause = paused(machine, 3600.0)
    machine.clock.pass_time(600.0)
    machine.clock.wall += jump_s
    pause = machine.agent() if restarted else pause
    assert pause.left_s() == pytest.approx(3000.0)
    assert pause.until() == pytest.approx(machine.clock.wall + 3000.0)
    machine.clock.pass_time(3000.0)
    assert pause.left_s() is None and machine.agent().left_s() is None


@pytest.mark.parametrize(
    ("off_s", "left_s"),
    [(1800.0, 1800.0), (DAY_S, None), (-DAY_S, 3600.0), (-50 * YEAR_S, 3600.0)],
)
def test_time_that_the_machine_is_off_counts_where_the_date_tells_it(
    machine: Machine, off_s: float, left_s: float | None
) -> None:
    paused(machine, 3600.0)
    machine.boot()
    machine.clock.wall += off_s
    pause = machine.agent()
    assert pause.left_s() == left_s
    assert pause.pending, "what is left is written, so that it is not counted twice"
    pause.flush()
    assert machine.agent().left_s() == left_s


def test_a_pause_begun_under_an_unset_clock_does_not_end_when_that_is_set(machine: Machine) -> None:
    machine.clock.wall = 3600.0
    paused(machine, 3600.0)
    machine.boot()
    machine.clock.wall = 1_800_000_000.0
    assert machine.agent().left_s() == 3600.0


def test_for_good_is_for_good(machine: Machine) -> None:
    paused(machine, None)
    machine.boot()
    machine.clock.wall += 10 * YEAR_S
    assert machine.agent().left_s() == math.inf == machine.agent().until()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"left_s": "long"}', b"\xff" * 40])
def test_a_pause_that_cannot_be_read_is_a_pause_and_says_so(machine: Machine, content: bytes) -> None:
    (machine.root / FILE_NAME).write_bytes(content)
    pause = machine.agent()
    assert (pause.left_s(), pause.reason) == (math.inf, UNREADABLE)
    pause.end()
    pause.flush()
    assert machine.agent().left_s() is None


def test_what_the_disk_refuses_holds_and_is_tried_again(machine: Machine) -> None:
    pause = machine.agent()
    blocked = machine.root / f".{FILE_NAME}.new"
    blocked.mkdir()
    pause.begin(None)
    with pytest.raises(StoreError):
        pause.flush()
    assert (pause.left_s(), pause.reason, pause.pending) == (math.inf, BY_USER, True)
    blocked.rmdir()
    pause.flush()
    assert not pause.pending and machine.agent().left_s() == math.inf
