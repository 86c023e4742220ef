"""The idle baseline: the power of the unused machine, per source."""

from collections import deque
from collections.abc import Collection

import msgspec

from port_agent.energy.attribution.timeline import Interval

_MIN_SAMPLES = 20
_MAX_SAMPLES = 240
IDLE_LOAD = 0.10
"""Share of busy processor time below which the machine counts as idle, unless a better signal exists."""


class IdleBaseline:
    """The median idle power of each source, from intervals in which the machine did nothing."""

    def __init__(self, known_watts: dict[str, float] | None = None) -> None:
        """`known_watts` are baselines of earlier runs, used until new ones are measured."""
        self._known_watts = dict(known_watts or {})
        self._samples: dict[str, deque[float]] = {}

    def add(self, interval: Interval) -> None:
        """Record an idle interval; gaps are ignored."""
        watts = interval.watts
        if watts is None:
            return
        samples = self._samples.setdefault(interval.source, deque(maxlen=_MAX_SAMPLES))
        samples.append(watts)
        # the median of a few hundred numbers takes 10 us; once per ten samples is often enough
        if len(samples) >= _MIN_SAMPLES and (len(samples) % 10 == 0 or interval.source not in self._known_watts):
            self._known_watts[interval.source] = _median(samples)

    def set_watts(self, source: str, watts: float) -> None:
        """Fix the baseline of a source that knows its own, such as a model."""
        self._known_watts[source] = watts

    def watts(self, source: str) -> float | None:
        """Return the idle power measured by `source`; None while unknown."""
        return self._known_watts.get(source)

    def known_watts(self) -> dict[str, float]:
        """Return all known baselines, to be stored for the next run."""
        return dict(self._known_watts)


def stored_baselines(content: str | None) -> dict[str, float]:
    """Return the baselines that an earlier run stored.

    If they are unreadable, return none; they are then measured again.
    """
    try:
        return msgspec.json.decode(content or "{}", type=dict[str, float])
    except msgspec.DecodeError:
        return {}


def _median(samples: Collection[float]) -> float:
    """Return the median, without loading `statistics`, which would add 2 MB to the supervisor."""
    ordered = sorted(samples)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
