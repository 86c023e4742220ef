"""No finalizer runs at the end of the process: what is accounted for there still reads what it would close."""

import ast
from collections.abc import Iterator

from tests.house import ROOT, product_files


def kept_for_the_end(text: str) -> Iterator[int]:
    """Yield the lines that make a `weakref.finalize` and leave it its turn when the interpreter ends."""
    if "finalize" not in text:
        return
    tree = ast.parse(text)
    excepted: set[ast.AST] = set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is False:
            owners = [
                target.value for target in node.targets if isinstance(target, ast.Attribute) and target.attr == "atexit"
            ]
            excepted.update(owners)
            names |= {owner.id for owner in owners if isinstance(owner, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in node.targets):
            excepted.add(node.value)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("weakref.finalize", "finalize")
            and node not in excepted
        ):
            yield node.lineno


def test_none_waits_for_the_end() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in product_files() for line in kept_for_the_end(path.read_text())
    ]
    assert not found, "finalizers that run before the report at the end; set .atexit = False: " + ", ".join(found)


def test_what_is_found() -> None:
    assert list(kept_for_the_end("weakref.finalize(a, os.close, 3)")) == [1]
    assert list(kept_for_the_end("self.end = weakref.finalize(a, os.close, 3)")) == [1]
    assert not list(kept_for_the_end("weakref.finalize(a, os.close, 3).atexit = False"))
    assert not list(kept_for_the_end("gone = weakref.finalize(a, os.close, 3)\ngone.atexit = False"))
