"""Load, pressure and who is at the keyboard."""

import os
from pathlib import Path

import pytest

from port_agent.facts import Answer
from port_agent.facts.idle import CpuLoad, cpu_signal, logind_signal, parse_busctl, parse_pressure, terminal_signal
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


@pytest.mark.parametrize("text", ["", "intr 1 2 3", "cpu  a b c d e f\n"])
def test_unknown_stat_format_is_a_fault(tmp_path: Path, text: str) -> None:
    load, tree = CpuLoad(), Tree(proc=write_tree(tmp_path, {"stat": text}))
    assert load.sample(tree, 0.0, 0.0) is None
    assert [fault.sensor for fault in tree.take_faults()] == ["cpu load"]


def test_voices() -> None:
    assert cpu_signal(None, OPTIONS).idle is Answer.UNKNOWN
    assert cpu_signal(24.0, OPTIONS).idle is Answer.YES
    assert cpu_signal(26.0, OPTIONS).idle is Answer.NO
    assert logind_signal(False).weak
    assert parse_busctl("b true\n") is True
    assert parse_busctl("t 68130403958") == 68130403958
    assert parse_busctl("Failed to connect") is None


def test_pressure() -> None:
    assert parse_pressure("some avg10=1.53 avg60=0.87 avg300=0.10 total=1234\nfull avg10=0.00") == 1.53
    assert parse_pressure("") is None


def test_terminals(tmp_path: Path) -> None:
    tree = Tree(dev=tmp_path)
    assert terminal_signal(tree, OPTIONS, 1000.0).idle is Answer.UNKNOWN
    write_tree(tmp_path, {"pts/0": "", "pts/1": "", "pts/ptmx": ""})
    for name, stamp in (("0", 500), ("1", 990), ("ptmx", 5000)):
        os.utime(tmp_path / "pts" / name, (stamp, stamp))
    assert terminal_signal(tree, OPTIONS, 1000.0).idle is Answer.NO
    assert terminal_signal(tree, OPTIONS, 1060.0).idle is Answer.YES
    assert terminal_signal(tree, OPTIONS, 900.0).idle is Answer.UNKNOWN  # clock set back
