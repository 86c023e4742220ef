"""What measures operators is a process like a worker: it loads torch as one does, and answers until nobody asks."""

import subprocess
import sys
from pathlib import Path

import msgpack
import msgspec
import pytest

from port_agent.prepare.measurement.measurement_process import (
    Event,
    Measure,
    MeasurementAnswer,
    MeasurementProgress,
    read_measured,
)
from port_agent.system.python_process import module_command
from port_planner.ir.bundle.codec import pack_graph
from tests.planner.steps import tiny_step

pytestmark = pytest.mark.process


def test_each_request_is_answered_with_what_a_worker_holds_where_that_was_asked(tmp_path: Path) -> None:
    graph = tiny_step().graphs["step"]
    source = tmp_path / "graphs"
    source.write_bytes(msgpack.packb([pack_graph(graph)]))
    request = [Measure(str(source), str(tmp_path / str(resident)), 2.0, resident) for resident in (True, False)]
    on_line = subprocess.run(
        [*module_command("port_agent.prepare.measurement.measurement_process"), "1"],
        check=True,
        capture_output=True,
        text=True,
        input="".join(msgspec.json.encode(one).decode() + "\n" for one in request),
    ).stdout.splitlines()
    events: list[Event] = [msgspec.json.decode(line, type=Event) for line in on_line]
    assert events.count(MeasurementAnswer()) == 2 and events[-1] == MeasurementAnswer()
    last = events[events.index(MeasurementAnswer()) - 1]
    assert isinstance(last, MeasurementProgress) and last.done == last.total
    bare, alone = (read_measured(Path(one.target)) for one in request)
    for measured in (bare, alone):
        assert len(measured.ops[0]) == len(graph.ops) and all(c.seconds > 0 and c.joules > 0 for c in measured.ops[0])
    assert bare.base_bytes > 0 and bare.retained_bytes > 0 and alone.retained_bytes == 0


def test_torch_is_loaded_as_a_worker_loads_it() -> None:
    program = "import sys, port_agent.prepare.measurement.measurement_process; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"
