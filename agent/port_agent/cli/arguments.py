"""Argument types of the command line.

Each reader rejects an invalid value in one line that ends with the remedy.
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

from port_agent.cli.help_format import HelpFormat
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
"""Characters of a path that a message shows; nobody types a longer one."""
MOST = 2**63 - 1
"""Largest value that the job store's columns and the worker's counters hold."""


class UsageError(PortError):
    """Arguments that contradict each other or name something that does not exist."""

    exit_code = ExitCode.IMPOSSIBLE


def add_federation_terms(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add the options by which the owner of a federated job limits its leader; `federation_terms` reads them."""
    parser.add_argument(
        "--leader",
        metavar="DEVICE",
        help="with --federated: the paired device, by name or id, that may lead the rounds (default: only this device)",
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
        metavar="EPSILON",
        help="with --federated: refuse rounds that would raise the epsilon that its data has spent, over all jobs, "
        "above this",
    )
    parser.add_argument(
        "--max-rounds", type=whole_number(1), metavar="N", help="with --federated: train no more than N rounds"
    )


def federation_terms(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the terms that the options of `add_federation_terms` give, in the agent's form.

    Raises UsageError if the job is not federated.
    """
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
    """Return a sentence that says who leads the rounds of a submitted job, and by which command."""
    if arguments.leader:
        return f"{arguments.leader} leads them, with: port-agent peer federate start {job['name']}"
    return f"Lead them from here with: port-agent peer federate start {job['name']}"


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]  # no generic class while it runs
    """Commands whose help begins with their summary, unless they have a description."""

    def add_parser(self, name: str, **options: Any) -> Any:
        summary = str(options.get("help", ""))
        return super().add_parser(name, **{"description": f"{summary[:1].upper()}{summary[1:]}.", **options})


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line: the cause, the remedy, and where to read more."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": HelpFormat, **options})
        self.register("action", "parsers", _Commands)

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with code 2.

        Control characters of the argument are shown escaped.
        """
        line = printable(message).replace("\n", "\\n")
        self.exit(2, f"{self.prog}: {line}; see {self.prog} --help\n")


def size(text: str) -> int:
    """Parse a size; return at least 1 byte.

    Raises ArgumentTypeError for anything else.
    """
    count = _parsed(parse_bytes, text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"the size {shown(text)} is less than one byte; give more, such as 300M")
    return count


def duration(text: str) -> float:
    """Parse a duration; return more than 0 seconds.

    Raises ArgumentTypeError for anything else.
    """
    seconds = _parsed(parse_duration, text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"the duration {shown(text)} is zero; give a longer one, such as 90s or 8h")
    return seconds


def pause_duration(text: str) -> float:
    """Parse the length of a pause; return more than 0 seconds and at most a year.

    Raises ArgumentTypeError for anything else.
    """
    seconds = duration(text)
    if seconds > LONGEST_PAUSE_S:
        raise argparse.ArgumentTypeError(
            f"the duration {shown(text)} is longer than a year; for no end, use `port-agent job pause` or `port-agent "
            "job run-now` without --for"
        )
    return seconds


def deadline(text: str) -> float:
    """Parse a time in the future; return its Unix time.

    Raises ArgumentTypeError for anything else.
    """
    return _parsed(lambda text: parse_deadline(text, clock.time()), text)


def deadline_or_none(text: str) -> float | None:
    """Parse a time in the future; return its Unix time, or None for "none".

    Raises ArgumentTypeError for anything else.
    """
    return None if text == "none" else deadline(text)


def since(text: str) -> float:
    """Parse a time in the past; return its Unix time.

    Raises ArgumentTypeError for anything else.
    """
    return _parsed(lambda text: parse_since(text, clock.time()), text)


def hours(text: str) -> tuple[time, time]:
    """Parse hours such as 22:00-07:00; return their begin and end.

    Raises ArgumentTypeError for anything else.
    """
    return _parsed(parse_hours, text)


def positive_number(text: str) -> float:
    """Parse a finite number above 0; raises ArgumentTypeError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a valid number above zero; write it like 0.25 or 3")
    return value


def whole_number(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return an argument type that accepts whole numbers from `least` to `most`.

    It raises ArgumentTypeError for anything else.
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
    """Parse HOST, HOST:PORT, [IPV6]:PORT or a bare IPv6 address; return the host, and the port or None.

    Raises ArgumentTypeError for anything else.
    """
    match = re.fullmatch(_BRACKETED, text) or re.fullmatch(_BARE_IPV6, text) or re.fullmatch(_HOST_AND_PORT, text)
    port = match["port"] if match else None
    if match is None or (port is not None and not 0 < int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a valid address; write it like 192.168.2.7, attic.local:9479 or [fd00::7]:9479"
        )
    return match["host"], int(port) if port is not None else None


def readable_file(text: str) -> Path:
    """Return the path of a file that can be read now.

    Raises ArgumentTypeError for anything else.
    """
    path = _path(text)
    with _refusing("read", text, "an existing file"):
        if stat.S_ISFIFO(path.stat().st_mode):  # opening a pipe would block until somebody writes to it
            raise argparse.ArgumentTypeError(f"{_named(text)} is a pipe; name a file")
        with path.open("rb") as file:
            file.read(1)
    return path


def readable_folder(text: str) -> Path:
    """Return the path of a directory that can be listed now.

    Raises ArgumentTypeError for anything else.
    """
    path = _path(text)
    with _refusing("list", text, "an existing directory"), os.scandir(path):
        pass
    return path


def readable_file_or_folder(text: str) -> Path:
    """Return the path of a file or directory that can be read now.

    Raises ArgumentTypeError for anything else.
    """
    return readable_folder(text) if os.path.isdir(_path(text)) else readable_file(text)  # noqa: PTH112  Path.is_dir raises for some


def writable_file(text: str) -> Path:
    """Return the path of a file that can be created or written; nothing is created yet.

    Raises ArgumentTypeError for anything else.
    """
    path = _path(text)
    with _refusing("write", text, "a file in a directory that you own"):
        if _exists(path):  # opening a directory for writing fails with a different error
            os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        else:
            _try_file(path.absolute().parent)
    return path


def writable_folder(text: str) -> Path:
    """Return the path of a directory that can be created or written into; nothing is created yet.

    Raises ArgumentTypeError for anything else.
    """
    path = _path(text)
    with _refusing("write to", text, "a directory that you own"):
        _try_file(_nearest(path))
    return path


def page_dirs(directories: list[Path]) -> list[Path]:
    """Return the directories of the media and create those that are missing.

    Raises UsageError if one of several is in RAM.
    """
    for directory in directories if len(directories) > 1 else []:
        if in_ram(_nearest(directory)):
            raise UsageError(
                f"--page-dir {directory} is itself in RAM ({file_system(_nearest(directory))}), so pages there would "
                "save no memory; name a directory on a disk, a card or zram"
            )
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    return directories


def use_cores(count: int) -> None:
    """Bind this process and its children to `count` of the available cores; raises UsageError if there are too few."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    if count > len(available):
        raise UsageError(f"--cpus {count}: this process has {len(available)} cores; give 1 to {len(available)}")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, list(available)[:count])


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    there = path.absolute()
    while not _exists(there):
        there = there.parent
    return there


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name one, such as . for this directory")
    return Path(text)


def _exists(path: Path) -> bool:
    """Return whether the path, or what a link points to, exists.

    Raises OSError for a path that cannot be resolved.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return path.is_symlink()
    return True


def _try_file(folder: Path) -> None:
    """Create a file in `folder` and delete it, because permission bits alone do not prove that it is writable.

    Raises OSError. Does not use `tempfile`, whose 0.3 MB an agent would keep in memory for months.
    """
    path = folder / f".port-agent-{os.urandom(8).hex()}"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    path.unlink()


def _named(path: str) -> str:
    return path[:_LONGEST_NAMED]


@contextlib.contextmanager
def _refusing(action: str, path: str, remedy: str) -> Iterator[None]:
    """Reject the path, with the remedy, if the block cannot use it.

    Turns an OSError, and Python's ValueError about a null character, into an ArgumentTypeError.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise argparse.ArgumentTypeError(f"cannot {action} {_named(path)}: {reason}; name {remedy}") from error


def _parsed(parse: Callable[[str], T], text: str) -> T:
    """Return the result of `parse`; turn its error into an ArgumentTypeError.

    Argparse discards the message of every other error.
    """
    try:
        return parse(text)
    except PortError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
