"""The line after which something is another is found in the frame that changed it."""

import functools
import inspect
from collections.abc import Callable

import pytest

from port_planner.capture.changed_line import line_of_change

held = {"value": 0, "runs": 0}


def _changes() -> int:
    held["runs"] += 1
    held["value"] += 1  # in a call
    return 2


def _by_call() -> None:
    first = 1
    _changes()
    assert first


def _by_its_result() -> None:
    held["value"] += _same()  # after a call
    held["runs"] += 1


def _same() -> int:
    unused = 3
    return unused


def _in_the_last_line() -> None:
    _same()
    held["value"] += 1  # at the end


def _raising() -> None:
    held["value"] += 1  # before an error
    raise ValueError


@pytest.mark.parametrize(
    ("run", "mark"),
    [
        (_by_call, "# in a call"),
        (_by_its_result, "# after a call"),
        (_in_the_last_line, "# at the end"),
        (functools.partial(max, (_in_the_last_line,), key=lambda run: run() or 0), "# at the end"),
        (_raising, "# before an error"),
    ],
)
def test_the_line_is_found_where_the_change_is(run: Callable[[], object], mark: str) -> None:
    lines, _ = inspect.getsourcelines(inspect.getmodule(_changes))  # type: ignore[arg-type]
    expected = next(i for i, line in enumerate(lines, 1) if line.rstrip().endswith(mark))
    assert line_of_change(run, lambda: held["value"]) == f"test_changed_line.py:{expected}"


def test_what_changes_nothing_has_no_line() -> None:
    assert line_of_change(_same, lambda: held["value"]) == ""
