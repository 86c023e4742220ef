"""When this device usually allows training, learned for each hour of the week, and what follows for a job."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from port_agent.system.clock import local_time

_DAYS, _HOURS = 7, 24
_HOUR_S = 3600.0
_REMEMBERED_S = 4 * _HOUR_S
"""Seconds that are remembered for each hour of the week: the last four weeks count most, and older ones fade."""
_PRIOR_S = 2 * _HOUR_S
"""Observation after which an hour of the week weighs as much as the same hour of the other days."""
_KNOWN_AFTER_S = 86400.0
"""Seconds of observation before anything is predicted, which is a day."""
_LONGEST_GAP_S = 7 * 86400.0
"""Longest gap in seconds.

A machine that was off could not train; times more than a week ago do not show what is usual.
"""
_LONGEST_FORECAST = timedelta(days=5 * 365)
_NOON = timedelta(hours=12)


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a job that needs some seconds of training should be done. None: never, at the usual times.

    `nights`: the number of spans from noon to noon in which it trains.
    """

    ends_at: datetime | None
    nights: int | None


class _Slot(msgspec.Struct):
    """One hour of the week: the seconds of observation, and the seconds of training at full speed in them."""

    watched_s: float = 0.0
    trained_s: float = 0.0

    def add(self, span_s: float, speed: float) -> None:
        kept = min(1.0, max(0.0, _REMEMBERED_S - span_s) / self.watched_s) if self.watched_s else 0.0
        self.watched_s = self.watched_s * kept + span_s
        self.trained_s = self.trained_s * kept + span_s * speed


class _Record(msgspec.Struct):
    slots: list[_Slot]
    looked_at: float | None = None


class UsualTimes:
    """Shares of each hour of the week in which training may run, as the policy decided it so far.

    The time between two looks counts as decided at the first of them; time without this process counts
    as time without training.
    """

    def __init__(self) -> None:
        self._record = _Record([_Slot() for _ in range(_DAYS * _HOURS)])
        self._speed = 0.0

    @classmethod
    def from_json(cls, text: str | None) -> "UsualTimes":
        """Load what `to_json` wrote; start empty if it is not readable."""
        times = cls()
        try:
            record = msgspec.json.decode(text or "", type=_Record)
        except msgspec.DecodeError:
            return times
        if len(record.slots) == _DAYS * _HOURS and all(_sound(slot) for slot in record.slots):
            times._record = record
        return times

    def to_json(self) -> str:
        """Return everything as text, a few kilobytes."""
        return msgspec.json.encode(self._record).decode()

    def look(self, wall_s: float, speed: float) -> None:
        """Record that from now on (Unix time) training may run at `speed`, from 0 (not at all) to 1
        (with the whole machine).

        If the clock is set back, observation continues from there; time that passes twice counts twice.
        """
        last, self._record.looked_at = self._record.looked_at, wall_s
        if last is not None:
            begin = max(last, wall_s - _LONGEST_GAP_S)
            for start, span_s in _hours(local_time(begin), wall_s - begin):
                self._record.slots[_index(start)].add(span_s, self._speed)
        self._speed = speed

    def skip(self, wall_s: float) -> None:
        """Continue from `wall_s`, ignoring the time until then, because the clock was set."""
        self._record.looked_at = wall_s

    def usual_day_s(self) -> float | None:
        """Return the seconds of training on an average day; None until a day was observed."""
        if sum(slot.watched_s for slot in self._record.slots) < _KNOWN_AFTER_S:
            return None
        return sum(self._share(index) for index in range(_DAYS * _HOURS)) * _HOUR_S / _DAYS

    def forecast(self, now: datetime, needed_s: float) -> Forecast | None:
        """Return when `needed_s` seconds of training from `now` (local time) on are done; None
        until a day was observed.
        """
        usual_s = self.usual_day_s()
        if usual_s is None:
            return None
        shares = [self._share(index) for index in range(_DAYS * _HOURS)]
        left_s, nights = needed_s, set()
        for start, span_s in _hours(now, _LONGEST_FORECAST.total_seconds() if usual_s else 0.0):
            share = shares[_index(start)]
            if share:
                nights.add((start - _NOON).date())
            if share and left_s <= span_s * share:
                return Forecast(start + timedelta(seconds=left_s / share), len(nights))
            left_s -= span_s * share
        return Forecast(None, None)

    def _share(self, index: int) -> float:
        """Return the share of an hour of the week that allows training.

        Four samples of one hour of the week are few, so they are mixed with those of the same hour on other days, with
        the weight of `_PRIOR_S` of observation.
        """
        slots = self._record.slots
        slot, usual = slots[index], _mean(slots[index % _HOURS :: _HOURS])
        if usual is None:
            return _mean(slots) or 0.0
        return (slot.trained_s + _PRIOR_S * usual) / (slot.watched_s + _PRIOR_S)


def _mean(slots: Sequence[_Slot]) -> float | None:
    watched_s = sum(slot.watched_s for slot in slots)
    return sum(slot.trained_s for slot in slots) / watched_s if watched_s else None


def _sound(slot: _Slot) -> bool:
    return math.isfinite(slot.watched_s) and 0.0 <= slot.trained_s <= slot.watched_s


def _index(moment: datetime) -> int:
    return moment.weekday() * _HOURS + moment.hour


def _hours(begin: datetime, span_s: float) -> Iterator[tuple[datetime, float]]:
    """Yield where each hour begins, the first at `begin`, and how many of its seconds belong to the span."""
    moment, end = begin, begin + timedelta(seconds=max(0.0, span_s))
    while moment < end:
        border = moment.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        yield moment, (min(border, end) - moment).total_seconds()
        moment = border
