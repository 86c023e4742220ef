"""Deadlines in human terms: a date, epochs and charging hours become seconds per step."""

import math
from dataclasses import dataclass
from datetime import datetime, time, timedelta

from port_planner.base.errors import ExitCode, PortError
from port_planner.base.units import format_seconds


class DeadlineError(PortError):
    """A deadline that cannot be met."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class Window:
    """Hours of the day in which training may run, local time; it may pass midnight. Equal ends: all day."""

    start: time
    stop: time

    def seconds_between(self, begin: datetime, end: datetime) -> float:
        """Return how many seconds of `begin`..`end` lie inside the window."""
        if begin >= end:
            return 0.0
        if self.start == self.stop:
            return (end - begin).total_seconds()
        total, day = 0.0, begin.date() - timedelta(days=1)
        while day <= end.date():
            opens = datetime.combine(day, self.start, begin.tzinfo)
            last = day + timedelta(days=1) if self.stop <= self.start else day
            closes = datetime.combine(last, self.stop, begin.tzinfo)
            total += max((min(end, closes) - max(begin, opens)).total_seconds(), 0.0)
            day += timedelta(days=1)
        return total


@dataclass(frozen=True, slots=True)
class Pace:
    """What a deadline requires: seconds available in all, steps, and seconds per step."""

    available_s: float
    steps: int
    seconds_per_step: float


def pace(now: datetime, deadline: datetime, window: Window | None, *, epochs: int, steps_per_epoch: int) -> Pace:
    """Return the seconds that each step may take; raises DeadlineError if no time is left at all."""
    if epochs < 1 or steps_per_epoch < 1:
        raise DeadlineError(f"{epochs} epochs of {steps_per_epoch} steps cannot be planned; both must be at least 1")
    if (now.tzinfo is None) != (deadline.tzinfo is None):
        now = now.astimezone() if deadline.tzinfo is not None else now.replace(tzinfo=None)
    hours = window if window is not None else Window(time(0), time(0))
    available = hours.seconds_between(now, deadline)
    steps = epochs * steps_per_epoch
    if available <= 0:
        raise DeadlineError(
            f"no charging time is left before {deadline:%Y-%m-%d %H:%M}; move the deadline or widen the charging hours"
        )
    return Pace(available, steps, available / steps)


def shortfall(wanted: Pace, step_seconds: float, sufficient_budget: str | None) -> str | None:
    """Return the problem if a step takes `step_seconds`, or None if the deadline holds.

    The text says by how much it is missed and what would suffice.
    """
    if step_seconds <= wanted.seconds_per_step:
        return None
    needed = step_seconds * wanted.steps
    late = needed - wanted.available_s
    fits = math.floor(wanted.available_s / step_seconds)
    remedy = (
        f"a budget of {sufficient_budget} would suffice"
        if sufficient_budget is not None
        else "no RAM budget makes it fast enough"
    )
    return (
        f"{wanted.steps} steps of {step_seconds:.3g} s take {format_seconds(needed)} of charging time, available are "
        f"{format_seconds(wanted.available_s)}: {format_seconds(late)} too much ({fits} steps fit); {remedy}, or move "
        "the deadline, train fewer epochs or widen the charging hours"
    )
