"""Generated problems: BERT stacks are those of the reference, residual nets have a true reverse graph."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import planning
from benchmarks.poet import parse_instance
from benchmarks.poet_stacks import KindError, bert_stack, generate, residual_net
from port_planner.search.solve import Outcome, solve
from tests.benchmarks.instances import reference_path

ROOT = Path(__file__).resolve().parents[2]


def test_twelve_blocks_are_the_reference_problem() -> None:
    known = json.loads(reference_path("bert__a72__ram50__rt110").read_text())
    made = bert_stack(12)
    assert made["edges"] == known["edges"] or sorted(made["edges"]) == sorted(
        map(list, {tuple(e) for e in known["edges"]})
    )
    assert made["budgets"]["ram_bytes"] == known["budgets"]["ram_bytes"]
    for mine, theirs in zip(made["nodes"], known["nodes"], strict=True):
        for key in ("ram_bytes", "compute_J", "pagein_J", "pageout_J", "runtime_s"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6), (mine["id"], key)


@pytest.mark.slow
def test_residual_nets_have_a_gradient_per_operand() -> None:
    data = residual_net(3)
    problem = parse_instance(data, "residual").problem
    assert problem.size == data["T"] == 14 * 3 + 5
    unused = [t for t in problem.tensors if t.name.startswith(("norm", "sum")) and t.accesses[-1] > problem.size // 2]
    assert not unused
    assert solve(problem, time_limit_s=5.0).outcome in (Outcome.OPTIMAL, Outcome.FEASIBLE)


def test_a_generated_problem_makes_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning.main(["--generate", "bert:5", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert row["nodes"] == 83 and row["overhead_joules"] <= row["greedy_joules"] + 1e-9


@pytest.mark.parametrize("text", ["vgg:3", "bert", "bert:0", "bert:x"])
def test_unknown_kinds_are_refused(text: str) -> None:
    with pytest.raises(KindError, match="bert:N"):
        generate(text)


@pytest.mark.process
def test_the_benchmark_runs_as_its_docstring_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", planning.__name__, "--generate", "bert:5", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert {path.name for path in tmp_path.iterdir()} == {f"{row['id']}.json", f"{row['id']}.solution.json"}
