"""What profiles operators is a process like a worker: it loads torch as one does, and holds as much."""

import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from agent.prepare.bundle import measure
from agent.prepare.profiling import COSTS_ALONE, RESIDENT, read_measured
from agent.system.python_process import module_command
from planner.ir.bundle.codec import pack_graph
from tests.planner.steps import tiny_step


def test_what_it_measured_is_read_back_with_what_a_worker_holds(tmp_path: Path) -> None:
    source, target = tmp_path / "graphs", tmp_path / "measured"
    graph = tiny_step().graphs["step"]
    source.write_bytes(msgpack.packb([pack_graph(graph)]))
    command = [*module_command("agent.prepare.profiling"), str(source), str(target), "1", "2.0"]
    for what in (RESIDENT, COSTS_ALONE):
        told = subprocess.run([*command, what], check=True, capture_output=True, text=True).stdout
        done, total = told.splitlines()[-1].split()
        assert done == total
        measured = read_measured(target)
        assert len(measured.ops[0]) == len(graph.ops) and all(c.seconds > 0 and c.joules > 0 for c in measured.ops[0])
        assert measured.base_bytes > 0


def test_torch_is_loaded_as_a_worker_loads_it() -> None:
    program = "import sys, agent.prepare.profiling; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


def test_costs_that_the_cache_knows_are_read_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graph = tiny_step().graphs["step"]
    measured = measure([graph], 1, 2.0, lambda *_: None, resident=False)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", never)
    assert measure([graph], 1, 2.0, lambda *_: None, resident=False).ops == measured.ops
    doubled = measure([graph], 1, 4.0, lambda *_: None, resident=False).ops
    assert [cost.joules for cost in doubled[0]] == [2 * cost.joules for cost in measured.ops[0]]
    for threads, resident in ((2, False), (1, True)):  # nobody measured those, or the cache does not know them
        with pytest.raises(AssertionError, match="a process was started"):
            measure([graph], threads, 2.0, lambda *_: None, resident=resident)
