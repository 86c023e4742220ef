"""Public names: each means one thing in the whole tree, and a function's docstring names the errors that it raises."""

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.house import ROOT, product_files, tree_of

RIGHT = {
    "add_commands": "every area of the command line offers it to `port_agent.cli.build_parser`",
    "main": "what `python -m` runs",
    "finetune": "the public function, and the recipe that its worker runs",
    "train": "the public function, and the two worker processes' own entry: by bundle on this machine, by board",
    "Storage": "one tensor's memory: in the recorded graph, and in a followed program",
}
"""Names that may stand in several modules, each with its reason."""

NO_ERRORS = ("NotImplementedError", "SystemExit")
"""A method that others fill in, and an end of the process."""


def public_names() -> dict[str, list[str]]:
    """Return the modules that define each public class or function at their top level."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in product_files():
        for node in tree_of(path).body:
            named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            if isinstance(node, named) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_public_names_do_not_collide() -> None:
    twice = {name: places for name, places in public_names().items() if len(places) > 1 and name not in RIGHT}
    assert not twice, f"qualify these names by what they are of: {twice}"


def public_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the public functions and methods of public classes in a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            if isinstance(child, ast.ClassDef):
                yield from public_functions(child)
            else:
                yield child


def raised_by(node: ast.AST) -> Iterator[str]:
    """Yield the classes of errors raised in a function itself; what a `try` with handlers raises inside stays there."""
    inside = {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda}
    for child in ast.iter_child_nodes(node):
        if type(child) in inside or (isinstance(node, ast.Try) and node.handlers and child in node.body):
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            error = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            name = error.attr if isinstance(error, ast.Attribute) else getattr(error, "id", "")
            if name[:1].isupper() and name not in NO_ERRORS:
                yield name
        yield from raised_by(child)


def test_public_functions_name_the_errors_that_they_raise() -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {name}"
        for path in product_files()
        for function in public_functions(tree_of(path))
        for name in sorted(set(raised_by(function)))
        if name not in (ast.get_docstring(function) or "")
    ]
    assert not silent, f"say in the docstring what these raise: {silent}"
