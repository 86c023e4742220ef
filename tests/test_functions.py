"""No function of the product is longer than a screen, and none takes more parameters than a reader keeps in mind."""

import ast
from collections.abc import Iterator
from functools import cache

from tests.house import ROOT, product_files, tree_of

MOST_LINES = 60
MOST_PARAMETERS = 8
"""`self` and `cls` beside them."""


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions of the product, each by its module, class and name."""
    for path in product_files():
        _, *module = path.relative_to(ROOT).with_suffix("").parts
        yield from _below(tree_of(path), ".".join(module))


def _below(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        inner = f"{name}.{child.name}" if isinstance(child, named) else name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner, child
        yield from _below(child, inner)


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines from `def` to the last one."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters, all kinds together."""
    a = function.args
    named = [p for p in (*a.posonlyargs, *a.args, *a.kwonlyargs) if p.arg not in ("self", "cls")]
    return len(named) + (a.vararg is not None) + (a.kwarg is not None)


@cache
def large_functions() -> dict[str, str]:
    """Return the size of each function that is too long or takes too many parameters."""
    sizes = ((name, lines_of(function), parameters_of(function)) for name, function in functions())
    return {
        name: f"{lines} lines, {parameters} parameters"
        for name, lines, parameters in sizes
        if lines > MOST_LINES or parameters > MOST_PARAMETERS
    }


def test_no_function_is_too_long_or_takes_too_many_parameters() -> None:
    wrong = [f"{name}: {size}" for name, size in large_functions().items()]
    assert not wrong, "\n".join(wrong)


def test_lines_and_parameters_are_counted() -> None:
    (function,) = ast.parse("def f(self, a, /, b, *c, d=1, **e):\n    return (\n        a\n    )\n").body
    assert isinstance(function, ast.FunctionDef)
    assert (lines_of(function), parameters_of(function)) == (4, 5)
