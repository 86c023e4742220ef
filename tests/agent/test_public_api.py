"""What `from port_agent import ...` gives: documented, loaded when it is asked for, and equal to the commands."""

import subprocess
import sys
from pathlib import Path

import pytest

import port_agent
from port_planner.job import TrainingJob
from tests.agent.cli.plan.small_script import SCRIPT, run, run_forked

PROGRAM = """
import sys
from pathlib import Path
from port_agent import PlanRequest, plan
path, main = list(sys.path), sys.modules["__main__"]
stages = []
request = PlanRequest(script=Path("train.py"), out=Path("mine.port"), ram_bytes=700 << 20, strategy="greedy", threads=1)
report = plan(request, lambda stage, share: stages.append(stage))
assert report.bundle == request.out and report.manifest.plans[0].ram_bytes == request.ram_bytes
assert 0 < report.measured_peak_bytes < request.ram_bytes
assert set(stages) <= set(report.stages) and sum(taken.wall_s for taken in report.stages.values()) <= report.planning_s
assert (path, main) == (sys.path, sys.modules["__main__"])
"""


def test_each_name_is_there_documented_and_from_one_place() -> None:
    assert set(port_agent.__all__) == set(port_agent._HOMES) and sorted(port_agent.__all__) == port_agent.__all__
    for name in port_agent.__all__:
        assert getattr(port_agent, name).__doc__, name
    assert port_agent.TrainingJob is TrainingJob
    with pytest.raises(AttributeError, match="has no attribute 'bundle'"):
        port_agent.bundle  # noqa: B018


@pytest.mark.process
def test_the_package_itself_loads_nothing() -> None:
    program = (
        "import sys, port_agent; print(*[n for n in ('torch', 'numpy', 'msgspec', 'port_planner') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()


@pytest.mark.process
def test_a_script_is_planned_as_by_the_command_and_trains_to_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = ("--ram", "700M", "--strategy", "greedy", "--threads", "1", "-o", "theirs.port")
    assert run_forked(tmp_path, "plan", "train.py", *words).returncode == 0
    weights = []
    for name, train in (("mine", run), ("theirs", run_forked)):  # each in a process of the kind that its plan counts
        out = ("--epochs", "1", "--out", f"{name}.safetensors", "--verify", "2")
        done = train(tmp_path, "train", f"{name}.port", *out)
        assert done.returncode == 0, done.stderr
        weights.append((tmp_path / f"{name}.safetensors").read_bytes())
    assert weights[0] == weights[1]
