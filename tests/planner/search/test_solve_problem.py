"""The solver's process: an answer for a problem, a line for what is none."""

import subprocess
import sys

import pytest

from port_planner.search.plan_problem import PlanProblem, pack_answer, pack_problem
from tests.planner.estimated_steps import budget, captured

pytestmark = pytest.mark.process

COMMAND = (sys.executable, "-m", "port_planner.search.solve_problem")


def test_the_answer_is_the_one_of_this_process() -> None:
    graph, costs = captured()
    problem = PlanProblem(graph, costs, budget(0.4), time_limit_s=5.0)
    done = subprocess.run(COMMAND, input=pack_problem(problem), capture_output=True, check=True)
    assert done.stdout == pack_answer(problem.solved()) and done.stderr == b""


def test_what_is_no_problem_ends_it_with_a_line() -> None:
    done = subprocess.run(COMMAND, input=b"no problem", capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"") and done.stderr.startswith(b"not a planning problem (10 bytes)")


def test_it_does_without_torch() -> None:
    program = "import sys, port_planner.search.solve_problem; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
