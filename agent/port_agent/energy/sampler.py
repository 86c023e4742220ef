"""Which power source is read, and what happens when it fails."""

from collections.abc import Callable

from port_agent.energy.attribution.timeline import Integrator, Interval
from port_agent.energy.issues import IssueList
from port_agent.energy.sources.power_source import Kind, PowerSource, SourceError, SourceInfo
from port_agent.energy.sources.registry import SourceChoice

_RETRY_S = 60.0
"""Seconds between searches for another source while the one in use fails."""


class Sampler:
    """Reads the best source that has something to measure, and turns its readings into intervals."""

    def __init__(
        self,
        choice: SourceChoice,
        issues: IssueList,
        on_change: Callable[[SourceInfo], None],
        reopen: Callable[[], SourceChoice] | None = None,
    ) -> None:
        """`on_change` receives the source that is used from now on; `reopen` looks for sources after a failure."""
        self.current: PowerSource | None = None
        """The source in use, or None before the first reading."""
        self._sources = choice.sources
        self._issues, self._on_change, self._reopen = issues, on_change, reopen
        self._integrator = Integrator()
        self._retry_s: float | None = None
        self._nothing_until_s: dict[str, float] = {}
        for report in choice.broken:
            issues.report("energy-source", report.text, report.remedy, key=report.name)

    def interrupt(self, reason: str) -> None:
        """Make the time since the last reading a gap."""
        self._integrator.interrupt(reason)

    def sample(self, now_s: float, expected_s: float) -> Interval | None:
        """Return the interval up to now from the best source that has something to measure.

        `expected_s`: the usual seconds between two samples; a much longer time is a gap.
        """
        for source in self._sources:
            name = source.info.name
            if now_s < self._nothing_until_s.get(name, 0.0):
                continue
            try:
                reading = source.read(now_s)
            except SourceError as error:
                self._issues.report("energy-source", error.problem, error.remedy, key=name)
                self._look_again(now_s)
                return self._integrator.fail(now_s, source.info, error.problem)
            self._issues.clear("energy-source", name)
            if reading is None:
                self._nothing_until_s[name] = now_s + source.info.period_s
                continue
            self._retry_s = None
            if self.current is not source:
                self.current = source
                self._on_change(source.info)
            return self._integrator.add(reading, source.info, expected_s)
        return None

    def close(self) -> None:
        """Close all sources."""
        for source in self._sources:
            source.close()

    def _look_again(self, now_s: float) -> None:
        """Look for sources again after a failure, at most once a minute: a driver may have been reloaded."""
        if self._retry_s is None:
            self._retry_s = now_s + _RETRY_S
        if self._reopen is None or now_s < self._retry_s:
            return
        self._retry_s = now_s + _RETRY_S
        for source in self._sources:
            source.close()
        choice = self._reopen()
        measured_before = any(source.info.kind is Kind.MEASURED for source in self._sources)
        measured_now = any(source.info.kind is Kind.MEASURED for source in choice.sources)
        # a dead sensor must not silently become an estimate: keep it and its gap
        if measured_now or not measured_before:
            self._sources, self._nothing_until_s = choice.sources, {}
            return
        for source in choice.sources:
            source.close()
