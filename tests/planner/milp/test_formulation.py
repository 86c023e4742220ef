"""FORMULATION.md and the model say the same names: in the tables, in the source, in HiGHS and in the file it writes."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import highspy
import pytest

from port_planner import milp
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.milp import columns, decision_rows, limit_rows, memory_rows, source_rows, time_rows, variant_rows
from port_planner.milp.columns import Breadth
from port_planner.milp.highs import HighsSession, LinearModel
from port_planner.milp.milp_model import Formulation
from port_planner.problem.coarsen import coarsen
from port_planner.problem.problem import Semantics
from port_planner.search.anytime import SMALLEST, captured_breadth
from tests.planner.brute_force import beside_host_memory, packed_pairs, random_problem, with_a_weight, with_variants
from tests.planner.steps import costs_of, wide_step

MODULES: tuple[ModuleType, ...] = (
    columns,
    decision_rows,
    source_rows,
    memory_rows,
    time_rows,
    limit_rows,
    variant_rows,
)
TEXT = (Path(milp.__file__).parent / "FORMULATION.md").read_text()
NAME = re.compile(r"`([a-z]\w*)(?:\([^`]*\))?`")


def documented(section: str) -> dict[str, str]:
    """Return name -> function of the table of one section."""
    body = TEXT.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("| `")]
    return {name: cells[-1].strip(" `") for cells in rows for name in NAME.findall(cells[0])}


def stem(argument: ast.expr) -> str:
    """Return what a name begins with, up to its parenthesis."""
    first = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
    text = first.value if isinstance(first, ast.Constant) else ""
    return str(text).partition("(")[0]


def named_in(tree: ast.AST, methods: dict[str, int]) -> set[str]:
    """Return the stems given to calls of `methods`, each with the place of its name among the arguments."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in methods and isinstance(node.args[methods[called]], ast.JoinedStr | ast.Constant):
                found.add(stem(node.args[methods[called]]))
            if called == "column" and isinstance(node.args[0], ast.Name) and node.args[0].id == "name":
                continue  # the name was built a line above, which the next branch sees
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "name" and "column" in methods:
            found.add(stem(node.value))
    return found


COLUMN_CALLS = {"column": 0, "hiding_column": 0}
ROW_CALLS = {"row": 0, "offer": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("section", "calls"), [("Columns", COLUMN_CALLS), ("Rows", ROW_CALLS)])
def test_every_name_of_the_document_is_in_the_code_and_back(section: str, calls: dict[str, int]) -> None:
    trees = [ast.parse(inspect.getsource(module)) for module in MODULES]
    assert set(documented(section)) == set().union(*(named_in(tree, calls) for tree in trees))


@pytest.mark.slow
@pytest.mark.parametrize(("section", "calls"), [("Columns", COLUMN_CALLS), ("Rows", ROW_CALLS)])
def test_every_name_is_created_in_the_function_that_the_document_names(section: str, calls: dict[str, int]) -> None:
    for name, function in documented(section).items():
        homes = [getattr(module, function) for module in MODULES if hasattr(module, function)]
        assert homes, f"{name}: there is no {function}"
        assert name in named_in(ast.parse(inspect.getsource(homes[0])), calls), f"{function} does not create {name}"


@cache
def models() -> tuple[LinearModel, ...]:
    """Return models of all three semantics, with packing, sliced updates and exact stages among them."""
    return tuple(_models())


def _models() -> Iterator[LinearModel]:
    for seed in range(40):
        for semantics in (Semantics.POET, Semantics.REAL):
            problem = random_problem(seed, semantics=semantics, packing=True)
            yield Formulation(problem, Breadth(exact_stages=seed % 2 == 0)).model
            yield Formulation(problem, SMALLEST).model
            yield Formulation(with_variants(problem, seed), Breadth(exact_stages=True)).model
            beside = beside_host_memory(problem, seed)
            yield Formulation(beside, Breadth()).model
            yield Formulation(with_a_weight(beside, seed, copied=True), Breadth()).model
        yield Formulation(replace(packed_pairs(seed), semantics=Semantics.ELASTIC), Breadth()).model
    graph = wide_step()
    costs = costs_of(graph, workspace=100_000)
    whole = lower(graph, costs, Plan()).peak_bytes
    for share in (0.4, 0.8):
        budget = round(share * whole)
        problem = coarsen(graph, costs, ram_bytes=budget).problem
        yield Formulation(problem, captured_breadth(problem)).model


def stems(names: list[str]) -> set[str]:
    return {name.partition("(")[0] for name in names}


@pytest.mark.slow
def test_every_documented_name_occurs_in_a_model() -> None:
    assert set(documented("Columns")) == set().union(*(stems(model.names) for model in models()))
    used = set().union(*(stems([*model.row_names, *model.impossible]) for model in models()))
    assert set(documented("Rows")) == used


@pytest.mark.slow
def test_names_are_unique() -> None:
    for model in models():
        assert len(set(model.names)) == model.columns
        assert len(set(model.row_names)) == model.rows


def test_a_written_model_reads_back_under_its_names(tmp_path: Path) -> None:
    model = max(models(), key=lambda m: m.columns)
    path = tmp_path / "model.lp"
    session = HighsSession(model)
    session.write(path, ["a legend", "of two lines"])
    assert list(session.highs.getLp().col_names_) == model.names
    assert list(session.highs.getLp().row_names_) == model.row_names
    assert path.read_text().startswith("\\ a legend\n\\ of two lines\n")
    solver: Any = highspy.Highs
    reader = solver()
    reader.setOptionValue("output_flag", False)
    assert reader.readModel(str(path)) == highspy.HighsStatus.kOk
    assert set(reader.getLp().col_names_) == set(model.names)
    assert set(reader.getLp().row_names_) == set(model.row_names)


def test_the_tests_that_the_document_names_exist() -> None:
    cited = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TEXT)
    assert cited
    for file, name in cited:
        homes = (Path(__file__).parents[2]).rglob(file)
        assert any(f"def {name}(" in home.read_text() for home in homes), f"{file}::{name}"
