"""The bench keeps its process for as long as it is entered, starts a bare one where memory is looked
at, and says how one ended.
"""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from port_agent.prepare.measurement.dry_run import DryRunError
from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
from port_planner import make_bundle
from port_planner.ir.graph import StepGraph
from port_planner.tiling.gradients import split_gradients_by_mask
from tests.agent.jobs_small import make_job
from tests.planner.steps import tiny_step

pytestmark = pytest.mark.process


def step() -> StepGraph:
    """Return a step whose convolution can be halved."""
    return make_bundle.prepare(make_job()).graphs["step"]


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
        if "port_agent.prepare.measurement.measurement_process" in command:
            found.append(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", noted)
    return found


def test_a_bench_that_is_entered_answers_all_in_one_process_and_says_how_it_ended(
    started: list["subprocess.Popen[str]"], tmp_path: Path
) -> None:
    graph = step()
    pairs = [(graph, split_gradients_by_mask(graph))]
    shares: list[float] = []
    with MeasurementWorker() as measurer:
        assert measurer.compare(pairs, 1, 1 << 30, tmp_path) == ((),)
        measured = measurer.measure([graph], 1, 2.0, lambda _, share: shares.append(share), resident=False)
        assert shares[-1] == 1.0 and len(measured.ops[0]) == len(graph.ops)
        assert [process.poll() for process in started] == [None]
        os.kill(started[0].pid, signal.SIGKILL)
        with pytest.raises(DryRunError, match="comparing tiled operators ended with exit code -9"):
            measurer.compare(pairs, 1, 1 << 30, tmp_path)


@pytest.mark.long
def test_what_a_process_holds_is_looked_at_in_a_bare_one_and_what_was_followed_is_its_last(
    started: list["subprocess.Popen[str]"], tmp_path: Path
) -> None:
    graph = step()
    with MeasurementWorker() as measurer:
        measurer.compare([(graph, split_gradients_by_mask(graph))], 1, 1 << 30, tmp_path)
        bare = measurer.measure([graph], 1, 2.0, lambda *_: None)
        assert [process.poll() for process in started] == [0, None] and bare.base_bytes > 0
        assert measurer.compare([(graph, split_gradients_by_mask(graph))], 1, 100 << 20, tmp_path) == ((),)
        assert [process.poll() for process in started] == [0, 0]
        measurer.measure([graph], 2, 2.0, lambda *_: None, resident=False)
        assert [process.poll() for process in started] == [0, 0, None]
    assert [process.poll() for process in started] == [0, 0, 0]


def test_one_that_loads_torch_ahead_is_bare_until_it_is_asked(started: list["subprocess.Popen[str]"]) -> None:
    graph = tiny_step().graphs["step"]
    with MeasurementWorker() as measurer:
        measurer.load(1)
        assert len(started) == 1
        assert measurer.measure([graph], 1, 2.0, lambda *_: None).base_bytes > 0
        assert [process.poll() for process in started] == [None], "what was loaded is asked"
        measurer.measure([graph], 1, 2.0, lambda *_: None)
        assert [process.poll() for process in started] == [0, None]
    with MeasurementWorker() as measurer:
        measurer.load(1)
    assert [process.poll() for process in started] == [0, 0, 0]


@pytest.mark.long
def test_one_that_is_not_entered_leaves_no_process(started: list["subprocess.Popen[str]"], tmp_path: Path) -> None:
    graph = step()
    assert MeasurementWorker().compare([(graph, split_gradients_by_mask(graph))], 1, 1 << 30, tmp_path) == ((),)
    assert [process.poll() for process in started] == [0]


def test_costs_that_the_cache_knows_are_read_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = tiny_step().graphs["step"]
    measured = MeasurementWorker().measure([graph], 1, 2.0, lambda *_: None, resident=False)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", never)
    assert MeasurementWorker().measure([graph], 1, 2.0, lambda *_: None, resident=False).ops == measured.ops
    doubled = MeasurementWorker().measure([graph], 1, 4.0, lambda *_: None, resident=False).ops
    assert [cost.joules for cost in doubled[0]] == [2 * cost.joules for cost in measured.ops[0]]
    for threads, resident in ((2, False), (1, True)):  # nobody measured those, or the cache does not know them
        with pytest.raises(AssertionError, match="a process was started"):
            MeasurementWorker().measure([graph], threads, 2.0, lambda *_: None, resident=resident)
