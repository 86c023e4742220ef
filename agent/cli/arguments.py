"""What the command line's arguments are made of: a reader for each kind, refusals in one line with the remedy."""

import argparse
import math
import time as clock
from collections.abc import Callable
from datetime import time
from typing import NoReturn, TypeVar

from planner.ir.errors import ExitCode, PortError
from planner.ir.times import parse_deadline, parse_hours, parse_since
from planner.ir.units import parse_bytes, parse_duration, shown

T = TypeVar("T")

MOST = 2**63 - 1
"""What the job store's columns and the worker's counters hold."""


class UsageError(PortError):
    """Arguments that do not go together, or that name what is not there."""

    exit_code = ExitCode.IMPOSSIBLE


class CommandParser(argparse.ArgumentParser):
    """A parser whose refusals are one line: the cause, the remedy, and where to read more."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with code 2.

        Control characters of the argument are made visible.
        """
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
        self.exit(2, f"{self.prog}: {line}; see {self.prog} --help\n")


def size(text: str) -> int:
    """Return the bytes, at least one, that `text` means.

    Raises ArgumentTypeError for anything else.
    """
    count = _told(parse_bytes, text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"the size {shown(text)} is nothing; give at least one byte, such as 300M")
    return count


def duration(text: str) -> float:
    """Return the seconds, more than 0, that `text` means.

    Raises ArgumentTypeError for anything else.
    """
    seconds = _told(parse_duration, text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"the duration {shown(text)} is nothing; give more, such as 90s or 8h")
    return seconds


def deadline(text: str) -> float:
    """Return the Unix time of a moment to come.

    Raises ArgumentTypeError for anything else.
    """
    return _told(lambda text: parse_deadline(text, clock.time()), text)


def deadline_or_none(text: str) -> float | None:
    """Return the Unix time of a moment to come, None for "none".

    Raises ArgumentTypeError for anything else.
    """
    return None if text == "none" else deadline(text)


def since(text: str) -> float:
    """Return the Unix time of a moment that was.

    Raises ArgumentTypeError for anything else.
    """
    return _told(lambda text: parse_since(text, clock.time()), text)


def hours(text: str) -> tuple[time, time]:
    """Return begin and end of hours such as 22:00-07:00.

    Raises ArgumentTypeError for anything else.
    """
    return _told(parse_hours, text)


def positive_number(text: str) -> float:
    """Return a finite number above 0; raises ArgumentTypeError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no number above zero; write it like 0.25 or 3")
    return value


def whole_number(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` to `most`.

    Raises ArgumentTypeError for anything else.
    """
    wanted = (
        f"from {least} to {most}; give one of these" if most != MOST else f"of at least {least}; give {least} or more"
    )

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{shown(text)} is no whole number {wanted}")
        return value

    return read


def _told(parse: Callable[[str], T], text: str) -> T:
    """Return what `parse` returns.

    Argparse swallows the message of every error but its own.
    """
    try:
        return parse(text)
    except PortError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
