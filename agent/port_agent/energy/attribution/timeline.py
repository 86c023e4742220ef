"""Turn readings into consecutive intervals, each with its joules or with the reason why they are unknown."""

from dataclasses import dataclass

from port_agent.energy.sources.power_source import Kind, SensorReading, SourceInfo

GAP_PERIODS = 3.0
GAP_MARGIN_S = 1.0
"""Seconds added to the expected periods of silence before they count as a gap, in which what happened is unknown."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A period of time on the metering clock and the energy used in it."""

    start_s: float
    end_s: float
    joules: float | None
    """Joules of the interval; None marks a gap: unknown, which is not zero."""
    source: str
    kind: Kind
    reason: str = ""
    """Why the joules are not known; empty if they are."""
    share: float = 1.0
    """Share of the whole machine's energy; less than 1 for one of several running jobs."""
    gpu: "GpuShare | None" = None
    """Part of the joules that was drawn by the GPU, or the rail that feeds it, if the source reports it."""

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return self.end_s - self.start_s

    @property
    def watts(self) -> float | None:
        """Mean power; None in a gap."""
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Energy of a GPU, or of the rail that feeds it, within an interval; `covers` says in words which."""

    joules: float
    covers: str


class Integrator:
    """Turns the readings of the source in use into intervals without spaces between them."""

    def __init__(self) -> None:
        self._end_s: float | None = None
        self._last: SensorReading | None = None
        self._info: SourceInfo | None = None
        self._trouble = ""

    def add(self, reading: SensorReading, info: SourceInfo, expected_period_s: float) -> Interval | None:
        """Return the interval that ends with `reading`; None for the first reading, and for one that
        is not newer than the last.

        Counters are subtracted, and power is integrated as a trapezoid. A change of source, an earlier failure or a
        silence of over three expected periods gives a gap.
        """
        if self._end_s is not None and reading.time_s <= self._end_s:
            return None
        start_s, last, changed = self._end_s, self._last, self._info is not None and self._info.name != info.name
        trouble, self._trouble = self._trouble, ""
        self._end_s, self._last, self._info = reading.time_s, reading, info
        if start_s is None:
            return None
        silence_s = reading.time_s - start_s
        if silence_s > GAP_PERIODS * max(expected_period_s, info.period_s) + GAP_MARGIN_S:
            trouble = trouble or f"no reading for {silence_s:.0f} s: suspended, or the agent was blocked"
        elif changed or last is None:
            trouble = trouble or f"first reading of {info.name}"
        joules = None if trouble or last is None else _joules_between(last, reading)
        if joules is None and not trouble:
            trouble = f"{info.name} changed its kind of figure"
        gpu = None if joules is None or last is None else _gpu_between(last, reading)
        return Interval(start_s, reading.time_s, joules, info.name, info.kind, trouble, gpu=gpu)

    def interrupt(self, reason: str) -> None:
        """Make the time up to the next reading a gap."""
        self._trouble = self._trouble or reason

    def fail(self, now_s: float, info: SourceInfo, reason: str) -> Interval | None:
        """Return the gap up to `now_s` after a failed reading; None before any reading, or if no time has passed."""
        start_s, self._end_s = self._end_s, now_s
        self._last, self._info, self._trouble = None, info, reason
        if start_s is None or now_s <= start_s:
            return None
        return Interval(start_s, now_s, None, info.name, info.kind, reason)


def _gpu_between(old: SensorReading, new: SensorReading) -> GpuShare | None:
    """Return the GPU's energy between two readings of the same rail."""
    if old.gpu is None or new.gpu is None or old.gpu.covers != new.gpu.covers:
        return None
    return GpuShare((old.gpu.watts + new.gpu.watts) / 2 * (new.time_s - old.time_s), new.gpu.covers)


def _joules_between(old: SensorReading, new: SensorReading) -> float | None:
    if old.counter_joules is not None and new.counter_joules is not None:
        return new.counter_joules - old.counter_joules
    if old.watts is not None and new.watts is not None:
        return (old.watts + new.watts) / 2 * (new.time_s - old.time_s)
    return None
