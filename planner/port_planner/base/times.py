"""Parse dates and times of day as people write them.

Deadlines and time windows share this grammar.
"""

import re
from datetime import datetime, time, timedelta

from port_planner.base.units import DurationError, DurationRangeError, UnitError, parse_duration, shown

_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2})")
_BARE_NUMBER = re.compile(r"[-+]?[0-9.]*")
_HOW = 'write it like 8h, 3d, 07:00, 2026-12-24 or "2026-12-24 18:00"'
_HOW_HOURS = 'write it like "22:00-07:00"'
_LAST_YEAR = 9000
"""Last year that is accepted.

Calendars of 64-bit seconds continue beyond it, but those of Python and of databases end at 9999 in every time zone.
"""
LATEST_UNIX = 4102444800.0
"""2100-01-01 in Unix time, which all calendars and time zones know."""


class MomentError(UnitError):
    """A moment cannot be read, or is on the wrong side of now."""


class HoursError(UnitError):
    """The hours of the day cannot be read."""


def parse_deadline(text: str, now_unix: float) -> float:
    """Return the Unix time of a future moment: "8h" from now, the next "07:00", or an ISO date and time.

    Uses local time if no zone is given. Raises MomentError for anything else, and for a moment in the past.
    """
    seconds = _span(text)
    if seconds is not None:
        return now_unix + seconds
    clock = _clock(text)
    if clock is not None:
        today = datetime.combine(datetime.fromtimestamp(now_unix), clock)
        return (today if today.timestamp() > now_unix else today + timedelta(days=1)).timestamp()
    moment = _date(text)
    if moment <= now_unix:
        raise MomentError(f"the moment {shown(text)} is in the past; give a future one: {_HOW}")
    return moment


_DAYS_AGO = {"today": 0, "yesterday": 1}


def parse_since(text: str, now_unix: float) -> float:
    """Return the Unix time of a past moment: "24h" ago, the last "07:00", "yesterday" or
    "today", or an ISO date and time.

    Uses local time if no zone is given. Raises MomentError for anything else, and for a moment in the future.
    """
    if text in _DAYS_AGO:
        day = datetime.fromtimestamp(now_unix) - timedelta(days=_DAYS_AGO[text])
        return datetime.combine(day, time()).timestamp()
    seconds = _span(text)
    if seconds is not None:
        return now_unix - seconds
    clock = _clock(text)
    if clock is not None:
        today = datetime.combine(datetime.fromtimestamp(now_unix), clock)
        return (today if today.timestamp() <= now_unix else today - timedelta(days=1)).timestamp()
    moment = _date(text)
    if moment > now_unix:
        raise MomentError(f"the moment {shown(text)} is in the future; give a past one: {_HOW}")
    return moment


def parse_hours(text: str) -> tuple[time, time]:
    """Return the start and end of "22:00-07:00", in local time.

    The span may cross midnight; "24:00" means midnight.

    Raises HoursError for anything else.
    """
    begin, _, end = text.partition("-")
    try:
        return _time_of_day(begin.strip()), _time_of_day("00:00" if end.strip() == "24:00" else end.strip())
    except ValueError as error:
        raise HoursError(f"{shown(text)} is not a valid time span; {_HOW_HOURS}") from error


def _span(text: str) -> float | None:
    """Return the seconds of a duration, or None if it is not one.

    Raises MomentError for a bare number, which could also be a year.
    """
    if _BARE_NUMBER.fullmatch(text.strip()):
        raise MomentError(f"{shown(text)} has no unit; {_HOW}")
    try:
        return parse_duration(text)
    except DurationRangeError as error:
        raise MomentError(str(error)) from error
    except DurationError:
        return None


def _clock(text: str) -> time | None:
    if _CLOCK.fullmatch(text.strip()) is None:
        return None
    try:
        return _time_of_day(text.strip())
    except ValueError as error:
        raise MomentError(f"{shown(text)} is not a valid time of day; {_HOW}") from error


def _time_of_day(text: str) -> time:
    match = _CLOCK.fullmatch(text)
    if match is None:
        raise ValueError("not HH:MM")
    return time(int(match[1]), int(match[2]))


def _date(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip())
        if not 1970 <= moment.year <= _LAST_YEAR:
            raise ValueError("outside the calendar")
        return moment.timestamp()
    except (ValueError, OverflowError) as error:
        raise MomentError(f"{shown(text)} is not a valid moment; {_HOW}") from error
