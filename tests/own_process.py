"""Tests that need an interpreter of their own: run with pytest in a process for each file, and
reported one by one here.

The simulated device must be known to torch before its first backward pass, and whoever looks for accelerators
afterwards would find it. The processes are forks (`tests/forked.py`): importing torch and pytest was two fifths
of what such a file took.
"""

import os
import tempfile
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.forked import run_forked

_MARK = "own_process"
_INSIDE = "PORT_TESTS_OWN_PROCESS"
"""Set in the environment of such a process."""


def leave_fixtures_to_own_process(item: pytest.Function) -> None:
    """Have no fixture of a marked test made here: one that makes the device known would leave
    it to all tests after it.
    """
    if item.get_closest_marker(_MARK) is not None and not os.environ.get(_INSIDE):
        item.fixturenames = []


def run_in_own_process(item: pytest.Function) -> bool | None:
    """Report what a marked test came to in its process; None where it is to be run here."""
    if item.get_closest_marker(_MARK) is None or os.environ.get(_INSIDE):
        return None
    outcomes, said = _run_file(item.path, str(item.config.option.markexpr))
    if item.name not in outcomes:
        pytest.fail(f"the process ended without a word on this test:\n{said}", pytrace=False)
    failure = outcomes[item.name]
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


@cache
def _run_file(path: Path, marks: str) -> tuple[dict[str, str], str]:
    """Return what each marked test of a file failed with ("" where it did not), and what pytest said."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        chosen = f"({marks}) and {_MARK}" if marks else _MARK
        words = [str(path), "-m", chosen, f"--junitxml={report}", "-p", "no:cacheprovider"]
        done = run_forked("pytest", "main", *words, environment={**os.environ, _INSIDE: "1"})
        said = (done.stdout + done.stderr)[-4000:]
        if not report.is_file():
            return {}, said
        found = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            wrong = [*case.findall("failure"), *case.findall("error")]
            found[str(case.get("name"))] = "\n".join(w.text or "" for w in wrong)
        return found, said
