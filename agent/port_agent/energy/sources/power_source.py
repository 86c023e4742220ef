"""A source of power figures: one protocol, and the values that pass through it.

A source never guesses. It returns a reading, or None if there is nothing to measure at the moment (a battery gauge on
mains). It raises `SourceError` if the value read is implausible.
"""

import enum
import json
import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from port_planner.base.errors import PortError


class SourceError(PortError):
    """A sensor fails: dead, forbidden, truncated or garbled. It becomes a health item, never a number."""

    def __init__(self, source: str, problem: str, remedy: str) -> None:
        super().__init__(f"{source}: {problem}; {remedy}")
        self.source = source
        self.problem = problem
        self.remedy = remedy


class SourceAbsent(SourceError):
    """This machine does not have the sensor. That is normal, and not a health item."""


class Kind(enum.Enum):
    """Whether a figure was measured by a sensor or computed from a model."""

    MEASURED = "measured"
    ESTIMATED = "estimated"


class Coverage(enum.Enum):
    """What part of the machine a source's watts cover, widest first."""

    WALL = "wall"  # at the plug, power supply included
    BOARD = "board"  # the board's total input
    RAIL_SUM = "rail sum"  # the rails that together feed the board; the carrier may be missing
    RAILS = "rails"  # some rails only: a lower bound
    BATTERY = "battery"  # the battery's output, only while discharging
    PACKAGE = "package"  # the processor package, with its memory if it is reported
    CARD = "card"  # graphics cards alone; never assumed to be the whole machine


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """A source's own description, shown wherever one of its figures is shown."""

    name: str
    kind: Kind
    coverage: Coverage
    covers: str
    """Description of what the source covers, including what is missing."""
    resolution_watts: float | None
    """Smallest step of the figure at the sampling period; None if the maker does not state it."""
    period_s: float
    """Shortest useful time between two readings, in seconds."""

    @property
    def title(self) -> str:
        """The name of the source's figures: `measured by rapl`, `estimated`."""
        return title_of(self.name, self.kind.value)

    def describe(self) -> str:
        """Return all of it on one line: kind, coverage, resolution and period."""
        steps = "" if self.resolution_watts is None else f" in steps of {self.resolution_watts:g} W"
        return f"{self.kind.value}{steps}, every {self.period_s:g} s: {self.covers}"

    def as_json(self) -> str:
        """Return all of it as JSON, for the ledger and its readers."""
        plain = asdict(self) | {"kind": self.kind.value, "coverage": self.coverage.value}
        return json.dumps(plain)


def title_of(source: str, kind: str) -> str:
    """Return `measured by rapl` or, if the source has no other name, `estimated`."""
    return kind if source == kind else f"{kind} by {source}"


@dataclass(frozen=True, slots=True)
class SensorReading:
    """One reading. Either figure may be None, never both."""

    time_s: float
    watts: float | None = None
    """Power at `time_s`."""
    counter_joules: float | None = None
    """Energy since the source was opened, with wraps already undone; only differences matter."""
    gpu: "GpuReading | None" = None
    """The part of `watts` drawn by the GPU, or the rail that feeds it; None if the source does not report it."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Power of a GPU, or of the rail that feeds it, within a source's total."""

    watts: float
    covers: str
    """Description of the rail, including what else it feeds."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The outcome of a source's self-test, for `port-agent doctor`."""

    ok: bool
    text: str
    remedy: str = ""


class PowerSource(Protocol):
    """One way to measure or estimate the machine's power."""

    @property
    def info(self) -> SourceInfo:
        """The source's own description."""

    def read(self, now_s: float) -> SensorReading | None:
        """Return the reading at `now_s`; None if there is nothing to measure.

        Raise `SourceError` if the source is broken.
        """

    def self_test(self, now_s: float) -> SelfTest:
        """Return whether this source works here, with the remedy if it does not. Never raises `SourceError`."""

    def close(self) -> None:
        """Close files and child processes."""


MAX_PLAUSIBLE_WATTS = 5000.0
"""Largest plausible power in watts: no machine that this project runs on draws more, so a
higher figure is a broken read.
"""


def probe_by_reading(source: PowerSource, now_s: float) -> SelfTest:
    """Return the self-test that most sources share: one reading, described in words."""
    try:
        reading = source.read(now_s)
    except SourceError as error:
        return SelfTest(False, error.problem, error.remedy)
    if reading is None:
        return SelfTest(True, "works, but has nothing to measure at the moment")
    if reading.watts is None:
        return SelfTest(True, "counter is readable")
    return SelfTest(True, f"reads {reading.watts:.2f} W")


def plausible_watts(source: str, watts: float) -> float:
    """Return `watts` if it can be a machine's power; raise `SourceError` otherwise."""
    if not math.isfinite(watts) or not 0 <= watts <= MAX_PLAUSIBLE_WATTS:
        raise SourceError(
            source,
            f"reads {watts:g} W, which no machine of this class draws",
            "check the wiring and the driver, or exclude the source with energy.disable",
        )
    return watts


_INTEGER = re.compile(r"-?\d{1,19}")


_MAX_ATTRIBUTE_BYTES = 1 << 16
"""Largest size in bytes: kernel attributes are at most a page."""


def read_text(source: str, path: Path) -> str:
    """Return the content of the small file at `path` without its final newline.

    Kernel attribute files end in a newline, so a text without one is a torn read. Raises SourceError with the remedy
    for a torn read, and if the file cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a third of the time of Path.read_text, once a second
        try:
            text = os.read(handle, _MAX_ATTRIBUTE_BYTES).decode("ascii")
        finally:
            os.close(handle)
    except PermissionError as error:
        raise SourceError(
            source,
            f"{path} may not be read",
            "run as root, or give the agent's group read access (deploy/ has the udev rule)",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(
            source, f"cannot read {path} ({error})", "check that the driver is loaded and the device attached"
        ) from error
    if not text.endswith("\n"):
        raise SourceError(source, f"{path} is truncated at {text[-20:]!r}", "a single torn read fixes itself")
    return text[:-1]


def read_integer(source: str, path: Path) -> int:
    """Return the whole number in the file at `path`; raise `SourceError` for any other content."""
    return parse_integer(source, read_text(source, path), str(path))


def parse_integer(source: str, text: str, where: str) -> int:
    """Parse a whole number; raise `SourceError` naming `where` for anything else."""
    if not _INTEGER.fullmatch(text.strip()):
        raise SourceError(source, f"{where} holds {text[:40]!r}, not a whole number", "see the driver's log (dmesg)")
    return int(text)
