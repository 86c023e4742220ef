"""A job is recorded and compared within the budget: the same bundle as with all memory, and less memory taken."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from port_agent.intercept.budget import UnsupportedError, budget
from port_agent.prepare.measurement.within_budget import within_budget
from port_agent.prepare.reference import compared_steps, with_expected_results
from port_planner.ir.bundle.codec import pack_graph
from port_planner.make_bundle import prepare
from tests.agent.jobs_small import make_job

ROOT = Path(__file__).resolve().parents[4]
TENSORS = "16K"
"""Less than the job's tensors take."""

MEASURE = """
import sys
sys.path.insert(0, {root!r})
import torch
from torch import nn
from torch.nn import functional
from port_agent.prepare.reference import with_expected_results
from port_agent.prepare.measurement.within_budget import within_budget
from port_planner.base.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from port_planner.job import TrainingJob
from port_planner.make_bundle import prepare
torch.set_num_threads(1)
def planned(width, depth):
    model = nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.randn(16, width), torch.randn(16, width)]
    job = TrainingJob(model, lambda m, x, y: functional.mse_loss(m(x), y), optimizer, data, 8)
    with_expected_results(prepare(job), 2)
planned(64, 2)
before = resident_bytes()
reset_peak()
if sys.argv[1] == "within":
    with within_budget(before + (120 << 20), "."):
        planned(1024, 24)
else:
    planned(1024, 24)
print(peak_resident_bytes() - before)
"""


@pytest.mark.process
def test_recording_and_comparing_stay_within_the_budget(tmp_path: Path) -> None:
    grown = {}
    for what in ("plain", "within"):
        command = [sys.executable, "-c", MEASURE.format(root=str(ROOT)), what]
        result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
        grown[what] = int(result.stdout) >> 20
    assert grown["plain"] > 250  # 24 layers of 4 MiB, their gradients, and a copy to put back
    assert grown["within"] < 140


@pytest.mark.process
def test_recording_within_a_budget_loads_no_compiler(tmp_path: Path) -> None:
    """torch._dynamo takes 70 MiB of a budget; every optimizer imports it."""
    loads = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from port_agent.prepare.measurement.within_budget import within_budget
from port_planner.make_bundle import prepare
with within_budget(2 << 30, "."):
    from tests.agent.jobs_small import make_job
    assert prepare(make_job()).graphs
print("torch._dynamo.eval_frame" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", loads], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout == "False\n"


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_is_recorded_does_not_depend_on_the_budget(accumulate: int, tmp_path: Path) -> None:
    def captured(job):  # type: ignore[no-untyped-def]
        made = with_expected_results(prepare(job), compared_steps(job))
        tensors = {k: t.sum().item() if isinstance(t, torch.Tensor) else t for k, t in made.tensors.items()}
        return {k: pack_graph(g) for k, g in made.graphs.items()}, made.reference, tensors, made.layouts

    plainly = captured(make_job(accumulate=accumulate, clip_grad_norm=0.5))
    with budget(tensors=TENSORS, page_dir=tmp_path):
        assert captured(make_job(accumulate=accumulate, clip_grad_norm=0.5)) == plainly


@pytest.mark.slow
def test_a_budget_below_the_process_itself_bounds_the_tensors(tmp_path: Path) -> None:
    with within_budget(1 << 20, tmp_path):
        prepare(make_job())


def test_one_budget_at_a_time(tmp_path: Path) -> None:
    following = budget(tensors=TENSORS, page_dir=tmp_path)
    with following, pytest.raises(UnsupportedError), within_budget(1 << 30, tmp_path):
        pass


@pytest.mark.process
def test_a_search_finds_room_that_tensors_took_and_they_come_back_as_they_were(tmp_path: Path) -> None:
    """In a process of its own: tests before this one leave memory that is given back first."""
    asks = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from port_agent.prepare.measurement.within_budget import within_budget
from port_planner.base.process_memory import resident_bytes
with within_budget(resident_bytes() + (120 << 20), ".") as make_free:
    weights = [torch.full((1 << 20,), float(i)) for i in range(16)]
    held = resident_bytes()
    make_free()
    print(held - resident_bytes())
    assert all(bool((weight == i).all()) for i, weight in enumerate(weights))
"""
    result = subprocess.run([sys.executable, "-c", asks], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert int(result.stdout) > 60 << 20


WHOLE = """
import sys
sys.path.insert(0, {root!r})
import torch
from port_agent.prepare.measurement.within_budget import within_budget
from port_planner.base.process_memory import resident_bytes
with within_budget(resident_bytes() + (150 << 20), "."):
    for _ in range(2):
        torch.ones(int(sys.argv[1]) << 18) + 1
"""


@pytest.mark.process
@pytest.mark.parametrize(("mib", "lines"), [(100, 0), (400, 1)])
def test_what_does_not_fit_while_planning_is_no_reason_to_ask_for_a_larger_budget(
    mib: int, lines: int, tmp_path: Path
) -> None:
    """It was said for each operator to "give" more, as if the bundle ran it as the recorded step does."""
    command = [sys.executable, "-c", WHOLE.format(root=str(ROOT)), str(mib)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stderr
    assert said.count("port-agent: planning took ") == said.count("\n") == lines
    assert "give" not in said and ("aten::" in said) == bool(lines)


@pytest.mark.slow
def test_garbage_is_not_looked_for_among_what_is_there_before_a_search(tmp_path: Path) -> None:
    before = gc.get_freeze_count()
    with within_budget(2 << 30, tmp_path) as make_free:
        captured = prepare(make_job())
        make_free()
        assert gc.get_freeze_count() > before + len(captured.graphs["step"].ops)
    assert gc.get_freeze_count() == 0
