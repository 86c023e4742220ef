"""The bench keeps its process for as long as it is entered, starts a bare one where memory is looked at, and says how one ended."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.prepare.bench import bench as module
from agent.prepare.bench.bench import Bench
from agent.prepare.bundle import TrialError
from planner.slices.gradients import split_gradients
from tests.planner.slices.test_comparison import step
from tests.planner.steps import tiny_step


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list["subprocess.Popen[str]"]:
    """Return the benches' processes that are started from now on."""
    found: list[subprocess.Popen[str]] = []
    begin = subprocess.Popen

    def noted(command: list[str], *arguments: Any, **options: Any) -> "subprocess.Popen[str]":
        process = begin(command, *arguments, **options)
        if "agent.prepare.bench.process" in command:
            found.append(process)
        return process

    monkeypatch.setattr(module.subprocess, "Popen", noted)
    return found


def test_a_bench_that_is_entered_answers_all_in_one_process(
    started: list["subprocess.Popen[str]"], tmp_path: Path
) -> None:
    graph, other = tiny_step().graphs["step"], step()
    shares: list[float] = []
    with Bench() as bench:
        bare = bench.measure([graph], 1, 2.0, lambda _, share: shares.append(share))
        assert bench.compare([(other, split_gradients(other))], 1, 1 << 30, tmp_path) == ((),)
        alone = bench.measure([other], 1, 2.0, lambda *_: None, resident=False)
        assert [process.poll() for process in started] == [None]
        bench.measure([graph], 1, 2.0, lambda *_: None)
        assert [process.poll() for process in started] == [0, None], "what it holds is looked at in a bare one"
    assert [process.poll() for process in started] == [0, 0]
    assert shares[-1] == 1.0 and bare.base_bytes > 0 and len(alone.ops[0]) == len(other.ops)


def test_one_that_is_not_entered_leaves_no_process(started: list["subprocess.Popen[str]"], tmp_path: Path) -> None:
    graph = step()
    assert Bench().compare([(graph, split_gradients(graph))], 1, 1 << 30, tmp_path) == ((),)
    assert [process.poll() for process in started] == [0]


def test_what_had_to_be_followed_is_the_last_that_its_process_did(
    started: list["subprocess.Popen[str]"], tmp_path: Path
) -> None:
    graph = step()
    with Bench() as bench:
        assert bench.compare([(graph, split_gradients(graph))], 1, 100 << 20, tmp_path) == ((),)
        assert [process.poll() for process in started] == [0]


def test_a_process_that_ends_is_an_error_and_the_next_request_has_another(
    started: list["subprocess.Popen[str]"], tmp_path: Path
) -> None:
    graph = step()
    pairs = [(graph, split_gradients(graph))]
    with Bench() as bench:
        bench.compare(pairs, 1, 1 << 30, tmp_path)
        os.kill(started[0].pid, signal.SIGKILL)
        with pytest.raises(TrialError, match="comparing operators in pieces ended with exit code -9"):
            bench.compare(pairs, 1, 1 << 30, tmp_path)
        assert bench.compare(pairs, 1, 1 << 30, tmp_path) == ((),)


def test_costs_that_the_cache_knows_are_read_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = tiny_step().graphs["step"]
    measured = Bench().measure([graph], 1, 2.0, lambda *_: None, resident=False)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(module.subprocess, "Popen", never)
    assert Bench().measure([graph], 1, 2.0, lambda *_: None, resident=False).ops == measured.ops
    doubled = Bench().measure([graph], 1, 4.0, lambda *_: None, resident=False).ops
    assert [cost.joules for cost in doubled[0]] == [2 * cost.joules for cost in measured.ops[0]]
    for threads, resident in ((2, False), (1, True)):  # nobody measured those, or the cache does not know them
        with pytest.raises(AssertionError, match="a process was started"):
            Bench().measure([graph], threads, 2.0, lambda *_: None, resident=resident)
