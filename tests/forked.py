"""Functions in forks of a process that has imported torch, and their module, and computed nothing: that is most of
what a short program takes.

A fork finds no thread there but those of numpy's library, which ends them before a fork. It is no place for what is
said of the start of a process: what that loads, what it takes before its first tensor, that it starts itself again
under another allocator. As a program (`python -m tests.forked MODULE`) this module is the process that forks.
"""

import atexit
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).parents[1]
_THREADS = "OMP_NUM_THREADS"
"""Torch looks for it once, when it is imported."""


@dataclass(frozen=True)
class _Request:
    """What a fork is to run: a function of the module, its words and surroundings, and the
    files that take what it says.
    """

    function: str
    words: list[str]
    folder: str
    environment: dict[str, str]
    output: str
    errors: str


def run_forked(
    module: str, function: str, *words: str, folder: Path = _ROOT, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Return how the function ended, called with `words` as the first thing that a process in `folder` does."""
    run_conditions = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory() as place:
        said = [Path(place) / name for name in ("output", "errors")]
        request = _Request(function, list(words), str(folder), run_conditions, *map(str, said))
        code = os.waitstatus_to_exitcode(_ask_for_fork(module, request))
        output, errors = (path.read_text(errors="replace") for path in said)
    return subprocess.CompletedProcess([module, *words], code, output, errors)


@cache
def _server(module: str) -> "subprocess.Popen[str]":
    """Return the process that forks for a module, so that no fork finds what another module
    loads; it ends with this one.
    """
    words = [sys.executable, "-m", "tests.forked", module]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    atexit.register(server.communicate)
    return server


def _ask_for_fork(module: str, request: _Request) -> int:
    """Have a fork do it, and return its status once it has ended."""
    server = _server(module)
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(asdict(request)) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that forks is gone"
    return int(answer)


def _serve(name: str) -> int:
    """Answer each request of the standard input, once its fork has ended, with the status of that."""
    import torch._dynamo  # noqa: F401  what forks begin with; optimizers import this at their first step

    module = importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would write into all that it shares
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return _run_as_fork(module, _Request(**json.loads(line)))
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()
    return 0


def _run_as_fork(module: ModuleType, request: _Request) -> int:
    """Become a process as if it had just been started, and call the function."""
    import torch

    nothing = os.open(os.devnull, os.O_RDONLY)
    output, errors = (os.open(path, os.O_WRONLY | os.O_CREAT) for path in (request.output, request.errors))
    for source, target in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(source, target)
    os.closerange(3, max(nothing, output, errors) + 1)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    if _THREADS in os.environ:
        torch.set_num_threads(int(os.environ[_THREADS]))
    code: int = getattr(module, request.function)(request.words)
    return code


if __name__ == "__main__":
    raise SystemExit(_serve(sys.argv[1]))
