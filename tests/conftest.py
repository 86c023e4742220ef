"""What a run of the tests says at its end: a table of the attacks that were made, and what they came to."""

import gc
import importlib.util
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from port_planner.base.code_pages import forget_large_folios
from tests.attack.outcome import AttackOutcome, Survived
from tests.own_process import leave_fixtures_to_own_process, run_in_own_process
from tests.process_marks import ProcessWatch, mark_own_processes
from tests.torch_forks import forks
from tests.torch_settings import remember_torch_settings, restore_torch_settings

_PROPERTY = "attack"
_SHOWN_HARM = 20
_SAMPLE = "sample"
_WATCH = ProcessWatch()


def pytest_configure() -> None:
    """Have torch's threads sleep where they wait for each other, and hear Ctrl-C; so do the programs that tests start.

    Beside other workers a thread's partner seldom has a core, and whoever waits for it by spinning takes that core
    away: small trainings of two threads took 27 to 37 s of the processor, 9 s so. A shell that puts the tests into the
    background turns Ctrl-C off.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux" and "PYTEST_XDIST_WORKER" not in os.environ:
        _forget_large_folios_of_torch()


def _forget_large_folios_of_torch() -> None:
    """Have the kernel read torch's libraries in small folios before any process of the tests maps them, which would keep large ones.

    Programs do it themselves where they are the only ones that run torch (`port_planner.base.code_pages`); with budgets
    of 60 MiB beside the process, a test would otherwise find other sizes on a freshly installed machine.
    """
    found = importlib.util.find_spec("torch")
    folder = Path(found.origin).parent / "lib" if found is not None and found.origin else Path()
    for library in folder.glob("libtorch*.so*"):
        forget_large_folios(str(library))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what has a row in the table of attacks, and which cases are left to long runs."""
    _leave_cases_to_long_runs([item for item in items if item.get_closest_marker(_SAMPLE) is not None])
    for item in items:
        if isinstance(item, pytest.Function):
            if "survived" in item.fixturenames:
                item.add_marker("attack")
            mark_own_processes(item)
            leave_fixtures_to_own_process(item)


def _leave_cases_to_long_runs(items: Sequence[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for test, of_test in cases.items():
        count: int = next(of_test[0].iter_markers(_SAMPLE)).args[0]
        drawn = random.Random(test).sample(of_test, min(count, len(of_test)))
        for item in of_test:
            if item not in drawn:
                item.add_marker("long")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have no garbage collection look at what is imported and collected, now or later: that
    took a third of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test of `make fast` whose fixtures start a process."""
    remember_torch_settings()
    with _WATCH.over(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test of `make fast` that starts a process."""
    with _WATCH.over(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Leave no setting of torch's to the next file."""
    result = yield
    restore_torch_settings(item, nextitem)
    return result


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run what is marked `own_process` in a fresh interpreter, all such tests of a file in one."""
    return run_in_own_process(pyfuncitem)


@pytest.fixture
def torch_forks() -> Iterator[None]:
    """Have modules of ours that load torch, workers too, run in forks of a process that has: where their
    start is not the subject.
    """
    with forks(nested=True):
        yield


@pytest.fixture
def survived(record_property: Callable[[str, object], None]) -> Survived:
    """Return what notes an attack for the table at the end, and fails where it did harm."""

    def check(outcome: AttackOutcome) -> None:
        record_property(_PROPERTY, asdict(outcome))
        assert not outcome.harmed, "\n".join(outcome.harmed[:_SHOWN_HARM])

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table: what was tried, how much of it did no harm, how the rest of it ended."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    rows = [
        value
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
        if name == _PROPERTY and isinstance(value, dict)
    ]
    if not rows:
        return
    terminalreporter.section("attacks")
    terminalreporter.write_line(f"{'attack':42} {'tried':>9} {'clean':>9}  how they ended")
    for row in rows:
        terminalreporter.write_line(f"{row['name']:42} {row['tried']:>9,} {row['clean']:>9,}  {row['notes']}")
