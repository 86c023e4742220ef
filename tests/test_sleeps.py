"""Tests wait for events and are handed clocks: none sleeps, none asserts on how long something took."""

import ast
from collections.abc import Iterator
from functools import cache

from tests.house import ROOT, parse

CLOCKS = frozenset({"monotonic", "perf_counter", "monotonic_ns", "perf_counter_ns"})

SLEEPS = frozenset(
    {
        "tests/agent/live_daemon.py::until",
        "tests/agent/peers/devices.py::solve",
        "tests/agent/peers/hostile.py::main",
        "tests/agent/supervisor/peers/test_federated_jobs.py::answered",
        "tests/agent/worker_program.py::main",
        "tests/agent/worker_program.py::run",
        "tests/attack/day.py::look",
        "tests/attack/leaving.py::unplug",
        "tests/attack/machine.py::_trains",
        "tests/attack/machine.py::_until",
        "tests/attack/machine.py::attack_sleep",
        "tests/attack/short_service.py::until_over",
        "tests/simulated_device.py::_copy_",
        "tests/simulated_device.py::_run",
        "tests/systemd/container.py::_wait_for_boot",
        "tests/systemd/machine.py::_connect",
        "tests/waiting.py::until",
        "tests/waiting.py::used_ticks",
        "tests/waiting.py::wait_until_drawn_moment",
    }
)
"""Functions that sleep: they look again and again at what sends no event, or play a device, a load or an attack.
It only ever gets shorter.
"""


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the outermost functions and methods of the tests and their helpers."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in _outermost(parse(path)):
            yield f"{path.relative_to(ROOT)}::{node.name}", node


def _outermost(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _outermost(child)


def sleeps(function: ast.AST) -> bool:
    """Return whether it calls `time.sleep` or `asyncio.sleep` with anything but zero."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep"):
            zero = node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if not zero:
                return True
    return False


def judges_duration(function: ast.AST) -> bool:
    """Return whether it asserts that a time it measured is above or below something."""
    measured: set[str] = set()

    def is_measured(node: ast.AST) -> bool:
        if isinstance(node, ast.BinOp):
            return is_measured(node.left) or is_measured(node.right)
        called = node.func if isinstance(node, ast.Call) else None
        return (isinstance(called, ast.Attribute) and called.attr in CLOCKS) or (
            isinstance(node, ast.Name) and node.id in measured
        )

    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and is_measured(node.value):
            measured |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    orders = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    return any(
        isinstance(test, ast.Compare)
        and any(isinstance(order, orders) for order in test.ops)
        and any(is_measured(side) for side in (test.left, *test.comparators))
        for node in ast.walk(function)
        if isinstance(node, ast.Assert)
        for test in ast.walk(node.test)
    )


@cache
def waiting_functions() -> tuple[frozenset[str], frozenset[str]]:
    """Return the functions that sleep, and the tests that judge a duration."""
    sleeping, judging = set(), set()
    for name, function in functions():
        if sleeps(function):
            sleeping.add(name)
        if "::test_" in name and judges_duration(function):
            judging.add(name)
    return frozenset(sleeping), frozenset(judging)


def test_nobody_sleeps_but_those_named() -> None:
    found, _ = waiting_functions()
    assert found <= SLEEPS, f"wait for an event instead (tests/waiting.py): {sorted(found - SLEEPS)}"
    assert found >= SLEEPS, f"take off the list: {sorted(SLEEPS - found)}"


def test_no_test_asserts_how_long_something_took() -> None:
    _, found = waiting_functions()
    assert not found, f"hand in a clock instead: {sorted(found)}"


def test_sleeps_and_durations_are_seen() -> None:
    sleeping = "async def f():\n    async def g():\n        await asyncio.sleep(0.1)\n"
    assert sleeps(ast.parse(sleeping)) and not sleeps(ast.parse(sleeping.replace("0.1", "0")))
    timed = "def f():\n    began = time.monotonic()\n    lasted = time.monotonic() - began\n    assert lasted < 3\n"
    assert judges_duration(ast.parse(timed)) and not judges_duration(ast.parse(timed.replace("< 3", "is not None")))
