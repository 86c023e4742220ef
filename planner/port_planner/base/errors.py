"""The errors of the whole project: one base class, and three parts in each message.

Every message says what happened, with which numbers, and what to do about it.
Closed outcomes of planning (optimal, feasible, infeasible, timed out) are results, not exceptions.
"""

import sys
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import FrameType

from port_planner.base.source_roots import PACKAGE_FOLDERS

_INSTALLED = frozenset(("site-packages", "dist-packages"))

_RUN_BY_LIBRARIES = ("forward", "step")
"""Methods of a library's modules and optimizers that a step runs."""


class ExitCode(IntEnum):
    """Exit codes of this project's processes: commands, the daemon and workers.

    The numbers never change.
    """

    DONE = 0
    """The request was fulfilled."""
    FAILED = 1
    """The request failed this time; the message says why and what to do."""
    IMPOSSIBLE = 2
    """The request can never succeed: a wrong argument, a broken bundle, a budget below the minimum."""
    UNREACHABLE = 3
    """No daemon answers."""
    DIVERGED = 4
    """The loss or the state became NaN or infinite; the last good checkpoint is kept."""
    LEFT = 75
    """EX_TEMPFAIL: a worker stopped on request and can be resumed, or another daemon already runs."""
    CONFIG = 78
    """EX_CONFIG: the configuration cannot be read."""
    INTERRUPTED = 130
    """Ctrl-C, as shells count it."""


class PortError(Exception):
    """Base class of every error that this project raises on purpose.

    The command line prints it without a traceback.
    """

    exit_code: int = ExitCode.FAILED


class CaptureError(PortError):
    """A step cannot be recorded faithfully."""

    exit_code = ExitCode.IMPOSSIBLE


class StatefulStepError(CaptureError):
    """A step counts, keeps tensors, or computes with different numbers each time, so later steps may differ."""


@cache
def of_the_program(filename: str) -> bool:
    """Return whether a source file is the user's: neither this project's, nor Python's, nor an installed package's."""
    return not (filename.startswith(_not_the_program()) or _INSTALLED & {*Path(filename).parts})


@cache
def _not_the_program() -> tuple[str, ...]:
    """Return the path prefixes of files that are not the user's: ours, libraries, Python's, and code without a file."""
    import sysconfig  # only here: it loads how Python was built, and most processes never ask

    pythons = ("purelib", "platlib", "stdlib", "platstdlib", "scripts")
    return (
        *(f"{folder}/" for folder in PACKAGE_FOLDERS),
        "<",
        *(f"{sysconfig.get_path(kind)}/" for kind in pythons),
        *_installed_with_torch(),
    )


def _installed_with_torch() -> Iterator[str]:
    """Yield the prefixes of paths that pip recorded in the folder into which it installed torch.

    The package keeps its dependencies in a folder of another name than Python's, and so does `pip install --target`,
    where the user's own files may be in the same folder.
    """
    import importlib.metadata
    import importlib.util

    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    folder = Path(torch.origin).parents[1]
    if _INSTALLED & {*folder.parts}:
        return
    for distribution in importlib.metadata.distributions(path=[str(folder)]):
        recorded = distribution.read_text("RECORD") or ""
        for name in {line.partition(",")[0].partition("/")[0] for line in recorded.splitlines()} - {"bin"}:
            yield f"{folder}/{name}" if name.endswith(".py") else f"{folder}/{name}/"


def place_of_function(function: object) -> str:
    """Return where a function is defined, such as "train.py:12"; for any other object, return its type."""
    code = getattr(function, "__code__", None)
    return type(function).__name__ if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def line_of_error(error: BaseException) -> str:
    """Return file and line of the program's innermost call that led to an exception, such as "train.py:12"; "" if none did."""
    found, trace = "", error.__traceback__
    while trace is not None:
        if of_the_program(trace.tb_frame.f_code.co_filename):
            found = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def program_line(inside: str = "") -> str:
    """Return file and line of the program's own innermost call, such as "train.py:12".

    Without one, return those of the library's module or optimizer that runs, such as "batchnorm.py:178 in BatchNorm1d";
    "" in a thread without either. `inside`: the name of a function; only its own calls count.
    """
    frame = sys._getframe(1)
    of_library: FrameType | None = None
    while frame.f_back is not None and not of_the_program(frame.f_code.co_filename):
        if frame.f_code.co_name == inside:
            break
        if of_library is None and frame.f_code.co_name in _RUN_BY_LIBRARIES:
            of_library = frame
        frame = frame.f_back
    if not of_the_program(frame.f_code.co_filename):
        return "" if of_library is None else f"{_line_of(of_library)} in {_class_in(of_library)}"
    return _line_of(frame)


def _line_of(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _class_in(frame: FrameType) -> str:
    return type(frame.f_locals.get("self")).__name__
