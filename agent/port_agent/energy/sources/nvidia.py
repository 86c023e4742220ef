"""The power of NVIDIA cards, from their sensors as `nvidia-smi` prints them. A Jetson's GPU is on
rails of its board instead.

A card that the kernel has switched off is left asleep: it draws almost no power, and a query would wake it.
`power.draw` is the mean of the last second on most cards; on some (A100, H100) the sensor is active for a quarter of
the time (arXiv 2312.02741).
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from port_agent.energy.sources.power_source import (
    Coverage,
    GpuReading,
    Kind,
    PowerSource,
    SelfTest,
    SensorReading,
    SourceAbsent,
    SourceError,
    SourceInfo,
    plausible_watts,
    probe_by_reading,
)
from port_agent.energy.sources.subprocess_source import command_output
from port_agent.facts.gpu import awake_cards
from port_agent.facts.sysfs import Tree

NAME = "nvidia"
TOOL = "nvidia-smi"
_QUERY = ("--query-gpu=uuid,power.draw", "--format=csv,noheader,nounits")
_LINE = re.compile(r"(GPU-[0-9a-f-]+), (\d+\.\d+|\[.+\])")
_REMEDY = f"run `{TOOL} {' '.join(_QUERY)}` to see what it prints"
_PERIOD_S = 10.0
"""Seconds between queries; a card that is queried at shorter intervals than its driver waits never goes to sleep."""
_COVERS = "the NVIDIA cards, their memory and fans"


def parse_draw(text: str) -> Mapping[str, float | None]:
    """Return the watts of each card by its UUID, None for one without a sensor; raise `SourceError` for an invalid
    line.
    """
    found: dict[str, float | None] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise SourceError(NAME, f"{TOOL} printed {line[:60]!r}, not a card and its watts", _REMEDY)
        found[match[1]] = None if match[2].startswith("[") else plausible_watts(NAME, float(match[2]))
    return found


class NvidiaSource:
    """All cards that are awake, or the named one; raises `SourceAbsent` if there is none, or none has a sensor."""

    def __init__(self, root: Path, card: str | None = None) -> None:
        """`card`: a UUID such as `GPU-...`, for a program that uses this card, which is therefore awake."""
        self._root, self._card = root, card
        if shutil.which(TOOL) is None or self._awake() is None:
            raise SourceAbsent(NAME, "there is no NVIDIA card, or no driver for it", "nothing to do")
        self.info = SourceInfo(
            NAME,
            Kind.MEASURED,
            Coverage.CARD,
            f"{_COVERS}; nothing else of the machine",
            resolution_watts=0.01,
            period_s=_PERIOD_S,
        )
        if self._asked() and not any(watts is not None for watts in self._draw().values()):
            raise SourceAbsent(NAME, "no NVIDIA card here has a power sensor", "nothing to do")

    def read(self, now_s: float) -> SensorReading:
        """Return the cards' power; raise `SourceError` if they do not report it."""
        watts = 0.0
        for card, own in self._draw().items() if self._asked() else ():
            if own is None:
                raise SourceError(NAME, f"card {card} does not report its power", "exclude it with energy.disable")
            watts += own
        return SensorReading(now_s, watts=watts, gpu=GpuReading(watts, _COVERS))

    def _asked(self) -> tuple[str, ...]:
        return (self._card,) if self._card is not None else self._awake() or ()

    def _awake(self) -> tuple[str, ...] | None:
        return awake_cards(Tree(self._root / "sys", self._root / "proc", self._root / "dev"))

    def _draw(self) -> Mapping[str, float | None]:
        return parse_draw(command_output(NAME, (TOOL, "-i", ",".join(self._asked()), *_QUERY), _REMEDY))

    def self_test(self, now_s: float) -> SelfTest:
        """Return whether the cards report their power."""
        return probe_by_reading(self, now_s)

    def close(self) -> None:
        """Do nothing: no file stays open."""


class WithCards:
    """A source of the machine, combined with that of its cards.

    The cards are added to the processor package; in a total that includes them, they are reported as its GPU.
    """

    def __init__(self, machine: PowerSource, cards: PowerSource) -> None:
        self._machine, self._cards = machine, cards
        self._adds = machine.info.coverage is Coverage.PACKAGE
        info = machine.info
        if self._adds:  # what such a machine draws at rest is another figure than the processor's alone
            self.info = replace(info, name=f"{info.name}+{NAME}", covers=f"{info.covers}; and {_COVERS}")
        else:
            self.info = replace(info, covers=f"{info.covers}; reported separately as part of it: {_COVERS}")
        self._before: SensorReading | None = None
        self._joules = 0.0

    def read(self, now_s: float) -> SensorReading | None:
        """Return the machine's reading including the cards; raise `SourceError` if they must
        be added and do not report.
        """
        before, self._before = self._before, None
        found = self._machine.read(now_s)
        if found is None:
            return None
        try:
            cards = self._cards.read(now_s)
        except SourceError:
            if self._adds:
                raise
            return found
        if cards is None or cards.watts is None:
            return None if self._adds else found
        self._before = replace(cards, time_s=found.time_s)
        if not self._adds:
            return replace(found, gpu=cards.gpu)
        if before is not None and before.watts is not None:
            self._joules += (before.watts + cards.watts) / 2 * (found.time_s - before.time_s)
        watts = None if found.watts is None else found.watts + cards.watts
        counter = None if found.counter_joules is None else found.counter_joules + self._joules
        return replace(found, watts=watts, counter_joules=counter, gpu=cards.gpu)

    def self_test(self, now_s: float) -> SelfTest:
        """Return the machine's own test."""
        return self._machine.self_test(now_s)

    def close(self) -> None:
        """Close both."""
        self._machine.close()
        self._cards.close()
