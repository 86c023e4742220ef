"""Tests stand where their modules stand: `agent/port_agent/b/c.py` is tested by
`tests/agent/b/test_c.py`; no test imports a test.
"""

import ast
from pathlib import Path

import pytest

from tests.house import ROOT, parse

PACKAGES = {"agent": "port_agent", "planner": "port_planner"}
"""Source roots, and the package in each."""

TESTED_WITH = {
    "tests/agent/facts/test_power_supply.py": ("agent/facts/readings",),
    "tests/agent/mcu/protocol/test_device.py": ("agent/mcu/board/board_errors",),
    "tests/agent/peers/test_announcement.py": ("agent/peers/state",),
    "tests/planner/mcu/test_frontend.py": ("planner/mcu/zoo",),
}
"""Modules that are tested together with another, by the test module that does it. It only ever gets shorter.

Values without rules (`facts/readings`, `peers/state`), errors and networks that only their users can judge
(`mcu/board/board_errors`, `mcu/zoo`).
"""


def modules() -> list[Path]:
    """Return the modules of the product: their source root, and where they lie in its package."""
    found = (
        Path(root) / path.relative_to(ROOT / root / package)
        for root, package in PACKAGES.items()
        for path in (ROOT / root / package).rglob("*.py")
    )
    return sorted(path for path in found if path.name not in ("__init__.py", "__main__.py"))


def own_test(module: Path) -> Path:
    """Return where the tests of a module belong."""
    return ROOT / "tests" / module.with_name(f"test_{module.name}")


def test_each_module_has_a_test_module_by_its_name() -> None:
    together = {name for names in TESTED_WITH.values() for name in names}
    missing = [
        str(module)
        for module in modules()
        if not own_test(module).is_file() and str(module.with_suffix("")) not in together
    ]
    assert not missing, "no test module by their name: " + ", ".join(missing)


@pytest.mark.parametrize("test", TESTED_WITH)
def test_what_is_tested_together_is_there_and_has_no_test_module_of_its_own(test: str) -> None:
    assert (ROOT / test).is_file() and TESTED_WITH[test]
    for name in TESTED_WITH[test]:
        module = Path(f"{name}.py")
        assert module in modules(), f"{module} is gone; take it off the list"
        assert not own_test(module).is_file(), f"{module} has its own test module; take it off the list"


def test_no_test_imports_a_test() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path.relative_to(ROOT)} imports relatively"
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            tests = [name for name in names if name.startswith("tests.") and name.split(".")[-1].startswith("test_")]
            assert not tests, f"{path.relative_to(ROOT)} imports {', '.join(tests)}"
