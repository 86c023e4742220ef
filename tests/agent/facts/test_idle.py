"""Load, pressure and who is at the keyboard."""

import os
from pathlib import Path

import pytest

from port_agent.facts import Answer
from port_agent.facts.idle import (
    CpuLoad,
    InputMonitor,
    cpu_signal,
    logind_signal,
    parse_busctl,
    parse_pressure,
    terminal_stamps,
)
from port_agent.facts.sysfs import Tree
from tests.agent.facts.machines import OPTIONS, stat
from tests.agent.trees import write_tree


def test_load_leaves_out_the_own_worker(tmp_path: Path) -> None:
    load, tree = CpuLoad(ticks_per_s=100), Tree(proc=tmp_path)
    write_tree(tmp_path, {"stat": stat(1000, 1000)})
    assert load.sample(tree, 0.0, 0.0) is None
    write_tree(tmp_path, {"stat": stat(1090, 1110)})  # 200 ticks passed, 90 busy
    assert load.sample(tree, 0.8, 1.0) == pytest.approx(5.0)  # 80 of them ours
    write_tree(tmp_path, {"stat": stat(1290, 1110)})
    assert load.sample(tree, 0.8, 1.2) == pytest.approx(5.0)  # too soon for a new figure
    assert load.sample(tree, 0.8, 2.0) == pytest.approx(100.0)


def test_load_survives_a_worker_that_ended(tmp_path: Path) -> None:
    load, tree = CpuLoad(ticks_per_s=100), Tree(proc=tmp_path)
    write_tree(tmp_path, {"stat": stat(1000, 1000)})
    load.sample(tree, 50.0, 0.0)
    write_tree(tmp_path, {"stat": stat(1010, 1090)})
    assert load.sample(tree, 0.0, 1.0) is None


def test_counters_that_stand_still_prove_nothing(tmp_path: Path) -> None:
    load, tree = CpuLoad(ticks_per_s=100), Tree(proc=tmp_path)
    for at_s, idle in ((0.0, 1000), (1.0, 1100), (2.0, 1100), (3.0, 1200)):
        write_tree(tmp_path, {"stat": stat(1000, idle)})
        found = load.sample(tree, 0.0, at_s)
        assert (found is None) == (at_s in (0.0, 2.0))
        assert bool(tree.take_faults()) == (at_s == 2.0)


@pytest.mark.parametrize("text", ["", "intr 1 2 3", "cpu  a b c d e f\n"])
def test_unknown_stat_format_is_a_fault(tmp_path: Path, text: str) -> None:
    load, tree = CpuLoad(), Tree(proc=write_tree(tmp_path, {"stat": text}))
    assert load.sample(tree, 0.0, 0.0) is None
    assert [fault.sensor for fault in tree.take_faults()] == ["cpu load"]


def test_voices() -> None:
    assert cpu_signal(None, OPTIONS).idle is Answer.UNKNOWN
    assert cpu_signal(24.0, OPTIONS).idle is Answer.YES
    assert cpu_signal(26.0, OPTIONS).idle is Answer.NO
    assert cpu_signal(12.0, OPTIONS, cpus=8).idle is Answer.YES
    assert cpu_signal(14.0, OPTIONS, cpus=8).idle is Answer.NO, "more than one core, though a seventh of the machine"
    assert logind_signal(False).weak and not logind_signal(False, works=True).weak
    assert parse_busctl("b true\n") is True
    assert parse_busctl("t 68130403958") == 68130403958
    assert parse_busctl("Failed to connect") is None


def test_pressure() -> None:
    assert parse_pressure("some avg10=1.53 avg60=0.87 avg300=0.10 total=1234\nfull avg10=0.00") == 1.53
    assert parse_pressure("") is None


def terminal_answer(monitor: InputMonitor, tree: Tree, now_s: float, wall_s: float = 1000.0) -> Answer:
    stamps = terminal_stamps(tree)
    monitor.look(stamps, now_s, {name: wall_s - stamp for name, stamp in stamps.items()})
    return monitor.signal("terminals", OPTIONS, now_s, "none").idle


def stamp(path: Path, at_s: int) -> None:
    path.touch()
    os.utime(path, (at_s, at_s))


def test_terminals(tmp_path: Path) -> None:
    tree, monitor = Tree(dev=tmp_path), InputMonitor()
    assert terminal_answer(monitor, tree, 0.0) is Answer.UNKNOWN
    write_tree(tmp_path, {"pts/0": "", "pts/1": "", "pts/ptmx": ""})
    for name, at_s in (("0", 500), ("1", 990), ("ptmx", 5000)):
        stamp(tmp_path / "pts" / name, at_s)
    assert terminal_answer(monitor, tree, 100.0) is Answer.NO
    assert terminal_answer(monitor, tree, 160.0) is Answer.YES
    stamp(tmp_path / "pts/0", 300)  # the clock was set back meanwhile: a change is a change
    assert terminal_answer(monitor, tree, 161.0) is Answer.NO
    assert terminal_answer(monitor, tree, 221.0) is Answer.YES
    stamp(tmp_path / "pts/2", 5000)  # opened in a future that never was
    assert terminal_answer(monitor, tree, 222.0) is Answer.NO
    (tmp_path / "pts/2").unlink()
    assert terminal_answer(monitor, tree, 282.0) is Answer.YES


@pytest.mark.parametrize("name", ["tty1", "tty63", "console", "ttyAMA0", "pts/7"])
def test_every_terminal_and_console_counts(tmp_path: Path, name: str) -> None:
    tree, monitor = Tree(sys=tmp_path / "sys", dev=tmp_path / "dev"), InputMonitor()
    write_tree(tmp_path, {"sys/class/tty/console/active": "tty0 ttyAMA0\n", f"dev/{name}": ""})
    stamp(tmp_path / "dev" / name, 0)
    assert terminal_answer(monitor, tree, 0.0) is Answer.YES
    stamp(tmp_path / "dev" / name, 8)
    assert terminal_answer(monitor, tree, 1.0) is Answer.NO


@pytest.mark.parametrize("name", ["ttyS1", "ttyGS0", "hvc0"])
def test_a_line_at_which_people_log_in_counts(tmp_path: Path, name: str) -> None:
    """Login and getty give the line to the group of /dev/tty; a device's line belongs to another."""
    tree = Tree(sys=tmp_path / "sys", dev=write_tree(tmp_path / "dev", {name: "", "tty": "", "ttyprintk": ""}))
    stamp(tmp_path / "dev" / name, 8)
    assert terminal_stamps(tree)[name] == 8
    if os.geteuid() == 0:
        os.chown(tmp_path / "dev" / name, 0, 65534)
        assert name not in terminal_stamps(tree)


def test_a_terminal_that_cannot_be_looked_at_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "pts").mkdir()
    (tmp_path / "pts/0").symlink_to("0")  # ELOOP, for root too
    tree = Tree(sys=tmp_path, dev=tmp_path)
    assert terminal_stamps(tree) == {}
    assert [fault.sensor for fault in tree.take_faults()] == ["terminals"]
    terminal_stamps(Tree(sys=tmp_path, dev=tmp_path / "nowhere", faults=tree.faults))
    assert [fault.sensor for fault in tree.take_faults()] == ["terminals"]


@pytest.mark.parametrize("name", ["ttyUSB0", "ttyACM0", "ttyS1"])
def test_a_serial_port_that_is_no_console_is_no_person(tmp_path: Path, name: str) -> None:
    tree = Tree(sys=tmp_path, dev=write_tree(tmp_path, {name: ""}))
    assert terminal_stamps(tree) == {}


def test_ages_read_as_durations_do() -> None:
    monitor = InputMonitor()
    monitor.look({"tty1": 1.0}, 0.0, {"tty1": 0.0})
    shown = [monitor.signal("terminals", OPTIONS, now_s, "none").detail for now_s in (4.2, 119.0, 749_519.0)]
    assert shown == ["last input 4 s ago (tty1)", "last input 119 s ago (tty1)", "last input 208 h 11 min ago (tty1)"]
