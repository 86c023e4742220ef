"""One room for what is known of operators: each in one row, none in a table elsewhere, and all that a step may use."""

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from port_planner.ir.allowed_operators import OperatorError, check_operator
from port_planner.operators import base_name, operator_of, overload_name
from port_planner.operators.row import Operator
from port_planner.operators.table import OPERATORS, ROWS
from tests.house import ROOT, product_files, tree_of
from tests.planner.steps import tiny_step
from tests.planner.tiling.language_step import language_step

ROOM = ROOT / "planner/port_planner/operators"
FEW = 2
"""Names of operators that make a table."""


def test_each_operator_stands_in_one_row() -> None:
    counts = Counter(name for names in ROWS for name in names.split())
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_two_rows_say_the_same() -> None:
    rows = [repr(row) for row in ROWS.values()]
    assert len(rows) == len(set(rows))


def test_a_row_is_found_by_any_overload() -> None:
    assert operator_of("aten::add.Tensor") is operator_of("aten::add") is OPERATORS["add"]
    assert base_name("aten::add_.Tensor") == "add_" and overload_name("aten::add_.Tensor") == "Tensor"
    assert overload_name("aten::add_") == ""


@pytest.mark.parametrize("name", ["port::guard", "aten::made_up", "other::add", ""])
def test_what_has_no_row_is_not_allowed(name: str) -> None:
    assert operator_of(name) == Operator(allowed=False)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad", "RMSprop"])
def test_every_operator_of_a_step_has_a_row(optimizer: str) -> None:
    graphs = [*tiny_step(optimizer).graphs.values(), *language_step().graphs.values()]
    assert {op.name for graph in graphs for op in graph.ops if base_name(op.name) not in OPERATORS} == set()


def test_what_is_allowed_is_what_a_bundle_may_call() -> None:
    for name, row in OPERATORS.items():
        if row.allowed:
            check_operator(f"aten::{name}")
        else:
            with pytest.raises(OperatorError):
                check_operator(f"aten::{name}")


def tables(tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """Yield the literals of a module that name operators and little else: their lines, and the names.

    Types are none of them.
    """
    types = {
        id(node.slice)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal"
    }
    for node in ast.walk(tree):
        if id(node) in types:
            continue
        if isinstance(node, ast.Set | ast.Tuple | ast.List):
            items: list[ast.expr | None] = [*node.elts]
        elif isinstance(node, ast.Dict):
            items = [*node.keys]
        else:
            continue
        words = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        names = [word for word in words if base_name(word) in OPERATORS]
        if len(names) >= FEW and 2 * len(names) > len(words):
            yield node.lineno, names


def test_no_other_room_has_a_table_of_operators() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {names[:3]}"
        for path in product_files()
        if ROOM not in path.parents
        for line, names in tables(tree_of(path))
    ]
    assert not found, f"what is known of operators belongs in {ROOM.relative_to(ROOT)}/table.py: {found}"


def test_a_table_would_be_found() -> None:
    assert sorted(
        tables(ast.parse('NAMES = frozenset(("aten::mm", "aten::addmm"))\nOTHERS = {"bmm": 1, "clone": 2}'))
    ) == [
        (1, ["aten::mm", "aten::addmm"]),
        (2, ["bmm", "clone"]),
    ]
    assert not [*tables(ast.parse('WORDS = ("mode", "name", "shape", "seconds")\nif name == "aten::clone":\n    pass'))]
