"""The version of the program is announced and printed, and decides nothing: no bundle, state or
message is checked by it.
"""

import ast

from tests.house import ROOT, parse

ANNOUNCES = {
    "agent/port_agent/cli/__init__.py",
    "agent/port_agent/cli/manual.py",
    "agent/port_agent/supervisor/peers/peer_discovery.py",
    "agent/port_agent/supervisor/peers/peer_fleet.py",
    "agent/port_agent/supervisor/peers/peers.py",
}
"""Modules that print the version or tell it to other devices."""


def test_only_what_announces_the_version_knows_it() -> None:
    knows = {
        str(path.relative_to(ROOT))
        for package in ("agent/port_agent", "planner/port_planner")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom)
        and node.module == "port_agent.system"
        and "VERSION" in {name.name for name in node.names}
    }
    assert knows == ANNOUNCES


def test_no_comparison_has_the_version() -> None:
    compared = [
        f"{name}:{node.lineno}"
        for name in ANNOUNCES
        for node in ast.walk(parse(ROOT / name))
        if isinstance(node, ast.Compare)
        and any(isinstance(part, ast.Name) and part.id == "VERSION" for part in ast.walk(node))
    ]
    assert not compared
