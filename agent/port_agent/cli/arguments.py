"""What the command line's arguments are made of.

A reader for each kind, refusals in one line with the remedy.
"""

import argparse
import contextlib
import math
import os
import re
import stat
import time as clock
from collections.abc import Callable, Iterator, Mapping
from datetime import time
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from port_agent.cli.terminal import printable
from port_agent.system.clock import LONGEST_PAUSE_S
from port_agent.system.mounts import file_system, in_ram
from port_planner.base.errors import ExitCode, PortError
from port_planner.base.times import parse_deadline, parse_hours, parse_since
from port_planner.base.units import parse_bytes, parse_duration, shown

T = TypeVar("T")

_WHOLE = "[-+]?[0-9]{1,19}"
_PORT = r"(?::(?P<port>[0-9]{1,5}))?"
_BRACKETED = rf"\[(?P<host>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]{_PORT}"
_BARE_IPV6 = r"(?P<host>[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)(?P<port>(?!))?"
_HOST_AND_PORT = rf"(?P<host>[A-Za-z0-9][A-Za-z0-9._-]{{0,250}}){_PORT}"
_LONGEST_NAMED = 200
"""Characters of a path in a message: what is longer is no path that a person typed."""
MOST = 2**63 - 1
"""What the job store's columns and the worker's counters hold."""


class UsageError(PortError):
    """Arguments that do not go together, or that name what is not there."""

    exit_code = ExitCode.IMPOSSIBLE


def add_federation_terms(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add what the owner of a federated job allows whoever leads it; `federation_terms` reads it."""
    parser.add_argument(
        "--leader",
        metavar="DEVICE",
        help="with --federated: the paired device, by name or id, that may lead rounds (default: only this device)",
    )
    parser.add_argument(
        "--require-secure",
        action="store_true",
        help="with --federated: refuse rounds in which the leader sees this device's weights (those without --secure)",
    )
    parser.add_argument(
        "--require-clip",
        type=positive_number,
        metavar="NORM",
        help="with --federated: refuse rounds that do not clip this device's change to this norm or less",
    )
    parser.add_argument(
        "--epsilon-budget",
        type=positive_number,
        metavar="E",
        help="with --federated: refuse rounds that would have its data spend more than this epsilon over its life, over all jobs",
    )
    parser.add_argument(
        "--max-rounds", type=whole_number(1), metavar="N", help="with --federated: train no more than N rounds"
    )


def federation_terms(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what `add_federation_terms` reads, as the agent takes it. Raises UsageError where nothing is federated."""
    terms = {
        "leader": arguments.leader or "",
        "require_secure": arguments.require_secure,
        "require_clip": arguments.require_clip,
        "epsilon_budget": arguments.epsilon_budget,
        "max_rounds": arguments.max_rounds,
    }
    given = next((name for name, value in terms.items() if value), None)
    if given is not None and not arguments.federated:
        raise UsageError(f"--{given.replace('_', '-')} is for a federated job; add --federated")
    return terms


def rounds_led(arguments: argparse.Namespace, job: Mapping[str, Any]) -> str:
    """Return how the rounds of a job that was submitted are led, a sentence."""
    if arguments.leader:
        return f"{arguments.leader} leads them, with: port-agent federate start {job['name']}"
    return f"Lead them from here with: port-agent federate start {job['name']}"


class CommandParser(argparse.ArgumentParser):
    """A parser whose refusals are one line: the cause, the remedy, and where to read more."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with code 2.

        Control characters of the argument are made visible.
        """
        line = printable(message).replace("\n", "\\n")
        self.exit(2, f"{self.prog}: {line}; see {self.prog} --help\n")


def size(text: str) -> int:
    """Return the bytes, at least one, that `text` means.

    Raises ArgumentTypeError for anything else.
    """
    count = _parsed(parse_bytes, text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"the size {shown(text)} is nothing; give at least one byte, such as 300M")
    return count


def duration(text: str) -> float:
    """Return the seconds, more than 0, that `text` means.

    Raises ArgumentTypeError for anything else.
    """
    seconds = _parsed(parse_duration, text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"the duration {shown(text)} is nothing; give more, such as 90s or 8h")
    return seconds


def pause_duration(text: str) -> float:
    """Return the seconds, more than 0 and a year at most, that `text` means; raises ArgumentTypeError for anything else."""
    seconds = duration(text)
    if seconds > LONGEST_PAUSE_S:
        raise argparse.ArgumentTypeError(
            f"the duration {shown(text)} is longer than a year; `port-agent pause` and `run-now` without --for have no end"
        )
    return seconds


def deadline(text: str) -> float:
    """Return the Unix time of a moment to come.

    Raises ArgumentTypeError for anything else.
    """
    return _parsed(lambda text: parse_deadline(text, clock.time()), text)


def deadline_or_none(text: str) -> float | None:
    """Return the Unix time of a moment to come, None for "none".

    Raises ArgumentTypeError for anything else.
    """
    return None if text == "none" else deadline(text)


def since(text: str) -> float:
    """Return the Unix time of a moment that was.

    Raises ArgumentTypeError for anything else.
    """
    return _parsed(lambda text: parse_since(text, clock.time()), text)


def hours(text: str) -> tuple[time, time]:
    """Return begin and end of hours such as 22:00-07:00.

    Raises ArgumentTypeError for anything else.
    """
    return _parsed(parse_hours, text)


def positive_number(text: str) -> float:
    """Return a finite number above 0; raises ArgumentTypeError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a valid number above zero; write it like 0.25 or 3")
    return value


def whole_number(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` to `most`.

    Raises ArgumentTypeError for anything else.
    """
    wanted = (
        f"from {least} to {most}; give one of these" if most != MOST else f"of at least {least}; give {least} or more"
    )

    def read(text: str) -> int:
        value = int(text) if re.fullmatch(_WHOLE, text.strip()) else least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a valid whole number {wanted}")
        return value

    return read


def host_and_port(text: str) -> tuple[str, int | None]:
    """Return host and port of HOST, HOST:PORT, [IPV6]:PORT or a bare IPv6 address; the port is None where none is given.

    Raises ArgumentTypeError for anything else.
    """
    match = re.fullmatch(_BRACKETED, text) or re.fullmatch(_BARE_IPV6, text) or re.fullmatch(_HOST_AND_PORT, text)
    port = match["port"] if match else None
    if match is None or (port is not None and not 0 < int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is no place; write it like 192.168.2.7, attic.local:9479 or [fd00::7]:9479"
        )
    return match["host"], int(port) if port is not None else None


def readable_file(text: str) -> Path:
    """Return the path of a file that can be read now.

    Raises ArgumentTypeError for anything else.
    """
    path = _path(text)
    with _refusing("read", text, "a file that is there"):
        if stat.S_ISFIFO(path.stat().st_mode):  # opening it would wait for who writes
            raise argparse.ArgumentTypeError(f"{_named(text)} is a pipe; name a file")
        with path.open("rb") as file:
            file.read(1)
    return path


def readable_folder(text: str) -> Path:
    """Return the path of a directory that can be listed now.

    Raises ArgumentTypeError for anything else.
    """
    path = _path(text)
    with _refusing("look into", text, "a directory that is there"), os.scandir(path):
        pass
    return path


def readable_file_or_folder(text: str) -> Path:
    """Return the path of a file or directory that can be read now.

    Raises ArgumentTypeError for anything else.
    """
    return readable_folder(text) if os.path.isdir(_path(text)) else readable_file(text)  # noqa: PTH112  Path.is_dir raises for some


def writable_file(text: str) -> Path:
    """Return the path of a file that can be made or written now; nothing is done yet.

    Raises ArgumentTypeError for anything else.
    """
    path = _path(text)
    with _refusing("write", text, "a file in a directory of yours"):
        if _exists(path):  # opening a directory for writing is an error of its own
            os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        else:
            _try_file(path.absolute().parent)
    return path


def writable_folder(text: str) -> Path:
    """Return the path of a directory that can be written into, or made: nothing is done yet.

    Raises ArgumentTypeError for anything else.
    """
    path = _path(text)
    with _refusing("write into", text, "a directory of yours"):
        _try_file(_nearest(path))
    return path


def page_dirs(directories: list[Path]) -> list[Path]:
    """Return the directories of the media, made where they are not there; raises UsageError where one of several is in RAM."""
    for directory in directories if len(directories) > 1 else []:
        if in_ram(_nearest(directory)):
            raise UsageError(
                f"--page-dir {directory} is itself in RAM ({file_system(_nearest(directory))}), so pages there would save nothing; name a "
                "directory on a disk, a card or zram"
            )
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    return directories


def use_cores(count: int) -> None:
    """Bind this process, and what it starts, to `count` of the cores that it may use; raises UsageError where there are fewer."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    if count > len(available):
        raise UsageError(f"--cpus {count}: this process may use 1 to {len(available)}")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, list(available)[:count])


def _nearest(path: Path) -> Path:
    """Return the path, or what is there of it."""
    there = path.absolute()
    while not _exists(there):
        there = there.parent
    return there


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name one, such as . for this directory")
    return Path(text)


def _exists(path: Path) -> bool:
    """Return whether something is there, where it leads.

    Raises OSError for a path that leads nowhere else.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return path.is_symlink()
    return True


def _try_file(folder: Path) -> None:
    """Make a file without a name in `folder`: permissions alone do not tell. Raises OSError."""
    import tempfile  # only here: a process that stays would carry it

    with tempfile.TemporaryFile(dir=folder):
        pass


def _named(path: str) -> str:
    return path[:_LONGEST_NAMED]


@contextlib.contextmanager
def _refusing(action: str, path: str, remedy: str) -> Iterator[None]:
    """Refuse the path, with the remedy, where the block cannot use it.

    Raises ArgumentTypeError for an OSError, and for Python's ValueError of a null character.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise argparse.ArgumentTypeError(f"cannot {action} {_named(path)}: {reason}; name {remedy}") from error


def _parsed(parse: Callable[[str], T], text: str) -> T:
    """Return what `parse` returns.

    Argparse swallows the message of every error but its own.
    """
    try:
        return parse(text)
    except PortError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
