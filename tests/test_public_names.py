"""A public class or function name means one thing in the whole tree, so that a reader need not ask which."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

RIGHT = {
    "add_commands": "every area of the command line offers it to `agent.cli.build_parser`",
    "main": "what `python -m` runs",
    "train": "the two worker processes' own entry: by bundle on this machine, by board",
    "Storage": "one tensor's memory: in the recorded graph, and in a followed program",
}
"""Names that may stand in several modules, each with its reason."""


def public_names() -> dict[str, list[str]]:
    """Return the modules that define each public class or function at their top level."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in ("agent", "planner"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                if named and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_public_names_do_not_collide() -> None:
    twice = {name: places for name, places in public_names().items() if len(places) > 1 and name not in RIGHT}
    assert not twice, f"qualify these names by what they are of: {twice}"
