"""POET's problems: the optimum is found and the independent checker agrees, files that make no sense are refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planning
from benchmarks.poet import InstanceError, parse_instance, read_instance, solution_matrices
from port_planner.problem.problem import ProblemError, Semantics
from port_planner.search.solve import Outcome, solve
from tests.benchmarks.instances import HEAVY, OWN, QUICK, best_known, checker, reference_path

LONG = [pytest.param(name, marks=pytest.mark.long) for name in HEAVY]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_reference_problems_reach_the_best_known(name: str) -> None:
    path = reference_path(name)
    problem = read_instance(path).problem
    solution = solve(problem, time_limit_s=9.0)
    assert solution.schedule is not None and solution.bound_joules is not None
    verdict = checker().check(json.loads(path.read_text()), solution_matrices(problem, solution.schedule))
    known = best_known(name)
    assert verdict["valid"], verdict["errors"]
    assert verdict["overhead_J"] <= known["overhead_J"] * 1.001 + 1e-12
    assert solution.bound_joules <= verdict["overhead_J"] * (1 + 1e-6) + 1e-12
    if known["proved"]:
        assert solution.outcome is Outcome.OPTIMAL


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_real_semantics_keep_the_physical_peak_and_the_deadline(name: str) -> None:
    path = reference_path(name)
    problem = read_instance(path, Semantics.REAL).problem
    solution = solve(problem, time_limit_s=9.0)
    assert solution.schedule is not None and solution.evaluation is not None
    verdict = checker().check(json.loads(path.read_text()), solution_matrices(problem, solution.schedule))
    assert verdict["valid"], verdict["errors"]
    assert problem.ram_bytes is not None and verdict["peak_physical_bytes"] <= problem.ram_bytes
    assert problem.deadline_s is not None and solution.evaluation.seconds <= problem.deadline_s * (1 + 1e-9)
    assert verdict["runtime"] <= solution.evaluation.seconds * (1 + 1e-9)
    serial = verdict["runtime"] + verdict.get("paging_time", 0.0)
    assert solution.evaluation.seconds <= serial * (1 + 1e-9)


@pytest.mark.parametrize("path", sorted(OWN.glob("*.json")), ids=lambda p: p.stem)
def test_own_problems(path: Path) -> None:
    data = json.loads(path.read_text())
    solution = solve(read_instance(path).problem)
    assert solution.outcome is Outcome.OPTIMAL
    assert solution.overhead_joules == pytest.approx(data["optimum_J"], abs=1e-9)


@pytest.mark.slow
def test_bert_hides_its_transfers_within_the_deadline() -> None:
    problem = read_instance(reference_path("bert__a72__ram50__rt110"), Semantics.REAL).problem
    solution = solve(problem, time_limit_s=9.0)
    assert solution.overhead_joules is not None and solution.overhead_joules <= 2.12


def _tiny() -> dict[str, Any]:
    return json.loads((OWN / "page_or_rebuild.json").read_text())


def test_malformed_problems_are_refused_with_the_reason(tmp_path: Path) -> None:
    broken = {
        "cyclic": lambda d: d["edges"].append([4, 1]),
        "T is 9": lambda d: d.update(T=9),
        "edge": lambda d: d["edges"].append([0, 99]),
        "runtime_ms": lambda d: d["nodes"][1].pop("runtime_s"),
        "ram_bytes": lambda d: d["nodes"][1].update(ram_bytes=-5),
        "compute_J": lambda d: d["nodes"][1].update(compute_J=float("nan")),
        "budgets": lambda d: d.update(budgets=[1]),
    }
    for reason, damage in broken.items():
        data = copy.deepcopy(_tiny())
        damage(data)
        with pytest.raises((InstanceError, ProblemError), match=reason):
            parse_instance(data, "damaged")
    path = tmp_path / "torn.json"
    path.write_text(json.dumps(_tiny())[:100])
    with pytest.raises(InstanceError, match="torn"):
        read_instance(path)


def test_duplicated_edges_count_once() -> None:
    data = _tiny()
    data["edges"] += data["edges"]
    once, twice = parse_instance(_tiny(), "a").problem, parse_instance(data, "a").problem
    assert once.tensors == twice.tensors


def test_the_benchmark_writes_what_the_checker_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = OWN / "page_or_rebuild.json"
    assert planning.main([str(source), "--out", str(tmp_path), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert row["outcome"] == "optimal" and row["cpu_seconds"] < 10
    written = json.loads((tmp_path / f"{row['id']}.solution.json").read_text())
    verdict = checker().check(json.loads(source.read_text()), written)
    assert verdict["valid"] and verdict["overhead_J"] == pytest.approx(row["overhead_joules"])


def test_an_impossible_budget_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _tiny()
    data["budgets"]["ram_bytes"] = 10
    path = tmp_path / "impossible.json"
    path.write_text(json.dumps(data))
    assert planning.main([str(path)]) == 3
    shown = capsys.readouterr().out
    assert "infeasible" in shown and "needs" in shown and "--ram" in shown
