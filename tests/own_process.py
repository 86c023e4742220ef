"""Tests that need an interpreter of their own: run with pytest in a process for each file, and reported one by one here.

The simulated device must be known to torch before its first backward pass, and whoever looks for accelerators afterwards
would find it. The processes are forks of one that has imported torch and pytest and computed nothing: importing them was
two fifths of what such a file took. A fork finds no thread there but those of numpy's library, which ends them before a fork. As a program (`python -m tests.own_process`) this module is that one.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

_MARK = "own_process"
_INSIDE = "PORT_TESTS_OWN_PROCESS"
"""Set in the environment of such a process."""
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class _Request:
    """What a fork is to run: pytest's words, its environment, and the file that takes what it says."""

    words: list[str]
    environment: dict[str, str]
    output: str


def leave_fixtures_to_own_process(item: pytest.Function) -> None:
    """Have no fixture of a marked test made here: one that makes the device known would leave it to all tests after it."""
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
        output = Path(folder) / "output.txt"
        _ask_for_fork(_Request(words, {**os.environ, _INSIDE: "1"}, str(output)))
        said = output.read_text(errors="replace")[-4000:]
        if not report.is_file():
            return {}, said
        found = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            wrong = [*case.findall("failure"), *case.findall("error")]
            found[str(case.get("name"))] = "\n".join(w.text or "" for w in wrong)
        return found, said


@cache
def _server() -> "subprocess.Popen[str]":
    """Return the process that forks; it ends with this one."""
    words = [sys.executable, "-m", "tests.own_process"]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    atexit.register(server.communicate)
    return server


def _ask_for_fork(request: _Request) -> None:
    """Run pytest in a fork and wait for its end."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(asdict(request)) + "\n")
    server.stdin.flush()
    assert server.stdout.readline(), "the process that forks is gone"


def _serve() -> int:
    """Answer each request of the standard input, once its fork has ended, with the status of that."""
    import torch._dynamo  # noqa: F401  what forks begin with; optimizers import this at their first step

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return _run_as_fork(_Request(**json.loads(line)))
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()
    return 0


def _run_as_fork(request: _Request) -> int:
    """Become a process as if it had just been started, and run pytest."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request.output, os.O_WRONLY | os.O_CREAT)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.closerange(3, max(nothing, output) + 1)
    os.environ.clear()
    os.environ.update(request.environment)
    return pytest.main(request.words)


if __name__ == "__main__":
    raise SystemExit(_serve())
