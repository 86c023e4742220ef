"""The product's sources, for the tests of how the house is built: they are parsed once in a process."""

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agent/port_agent", "planner/port_planner")


@cache
def product_files() -> tuple[Path, ...]:
    """Return the product's modules, in the order of their paths."""
    return tuple(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))


def parse(path: Path) -> ast.Module:
    """Return a module's tree; no garbage is looked for meanwhile, which took four times as long."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if collects:
            gc.enable()


@cache
def _trees() -> dict[Path, ast.Module]:
    gc.collect()
    trees = {path: parse(path) for path in product_files()}
    gc.freeze()  # they stay: whoever looks for garbage later would look at each of their million nodes
    return trees


def tree_of(path: Path) -> ast.Module:
    """Return the tree of a module of the product, which is not to be changed."""
    return _trees()[path]
