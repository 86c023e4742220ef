"""Which source is read: the best that has something to say; one that fails leaves a gap and never a guess."""

from collections.abc import Callable

import pytest

from port_agent.energy.attribution.timeline import Interval
from port_agent.energy.issues import IssueList
from port_agent.energy.sampler import Sampler
from port_agent.energy.sources.power_source import Kind, SensorReading
from port_agent.energy.sources.registry import SourceChoice, SourceReport
from tests.agent.energy.recordings import ScriptedSource


class MeasurementWorker:
    """A sampler that is asked once a second."""

    def __init__(self, *sources: ScriptedSource, reopen: Callable[[], SourceChoice] | None = None) -> None:
        self.now_s, self.issues, self.used = 100.0, IssueList(), list[str]()
        self.sampler = Sampler(SourceChoice(sources, ()), self.issues, lambda info: self.used.append(info.name), reopen)

    def sample(self, seconds: float = 1.0) -> Interval | None:
        self.now_s += seconds
        return self.sampler.sample(self.now_s, 1.0)


def scripted(name: str, value: float | SensorReading | str | None, **of: object) -> ScriptedSource:
    source = ScriptedSource(name, **of)  # type: ignore[arg-type]
    source.value = value
    return source


def test_the_first_that_has_something_to_measure_is_read() -> None:
    battery, chip = scripted("battery", None), scripted("chip", 4.0)
    bench = MeasurementWorker(battery, chip)
    assert bench.sample() is None and bench.used == ["chip"] and bench.sampler.current is chip
    interval = bench.sample()
    assert interval is not None and (interval.joules, interval.source) == (4.0, "chip")
    battery.value = 9.0
    changed = bench.sample()
    assert changed is not None and changed.joules is None and "first reading of battery" in changed.reason
    assert bench.used == ["chip", "battery"]


def test_who_has_nothing_to_measure_is_asked_again_after_its_period() -> None:
    slow, chip = scripted("slow", None, period_s=10.0), scripted("chip", 4.0)
    bench = MeasurementWorker(slow, chip)
    bench.sample()
    slow.value = 9.0
    for _ in range(9):
        bench.sample()
        assert bench.sampler.current is chip
    bench.sample()
    assert bench.sampler.current is slow


def test_a_source_that_fails_is_a_gap_and_an_issue_and_no_other_stands_in() -> None:
    chip, estimate = scripted("chip", 4.0), scripted("estimated", 3.0, kind=Kind.ESTIMATED)
    bench = MeasurementWorker(chip, estimate)
    bench.sample(), bench.sample()
    chip.value = "torn off"
    gap = bench.sample()
    assert gap is not None and (gap.joules, gap.reason, gap.source) == (None, "torn off", "chip")
    (issue,) = bench.issues.all()
    assert (issue.code, issue.key, issue.reason, issue.remedy) == (
        "energy-source",
        "chip",
        "torn off",
        "plug it in again",
    )
    chip.value = 4.0
    back = bench.sample()
    assert back is not None and back.joules is None, "the time since the failure is not known"
    assert bench.issues.all() == () and bench.used == ["chip"]


def test_sources_are_looked_for_again_once_a_minute_while_they_fail() -> None:
    opened = list[ScriptedSource]()

    def reopen() -> SourceChoice:
        opened.append(scripted("chip", "still gone"))
        return SourceChoice((opened[-1],), ())

    first = scripted("chip", "gone")
    bench = MeasurementWorker(first, reopen=reopen)
    for _ in range(60):
        bench.sample()
    assert not opened and not first.closed
    bench.sample()
    assert len(opened) == 1 and first.closed
    for _ in range(59):
        bench.sample()
    assert len(opened) == 1
    bench.sample()
    assert len(opened) == 2 and opened[0].closed and not opened[1].closed


def test_a_dead_sensor_is_kept_where_only_an_estimate_is_found_and_that_is_given_back() -> None:
    estimates = list[ScriptedSource]()

    def reopen() -> SourceChoice:
        estimates.append(scripted("estimated", 3.0, kind=Kind.ESTIMATED))
        return SourceChoice((estimates[-1],), ())

    dead = scripted("chip", "gone")
    bench = MeasurementWorker(dead, reopen=reopen)
    for _ in range(200):
        interval = bench.sample()
        assert interval is None or interval.joules is None
    assert len(estimates) == 3 and all(estimate.closed for estimate in estimates)
    dead.value = 4.0
    bench.sample()
    alive = bench.sample()
    assert alive is not None and alive.joules == 4.0


def test_an_estimate_is_replaced_by_whatever_is_found() -> None:
    found = scripted("chip", 5.0)
    bench = MeasurementWorker(
        scripted("estimated", "no model", kind=Kind.ESTIMATED), reopen=lambda: SourceChoice((found,), ())
    )
    for _ in range(62):
        bench.sample()
    assert bench.sampler.current is found


def test_what_interrupts_is_a_gap_up_to_the_next_reading() -> None:
    bench = MeasurementWorker(scripted("chip", 4.0))
    bench.sample()
    bench.sampler.interrupt("the clock was set")
    gap, after = bench.sample(), bench.sample()
    assert gap is not None and (gap.joules, gap.reason) == (None, "the clock was set")
    assert after is not None and after.joules == 4.0


def test_a_source_that_was_broken_when_it_was_opened_is_said_and_all_are_given_back() -> None:
    issues, chip, other = IssueList(), scripted("chip", 1.0), scripted("other", 1.0)
    reports = (
        SourceReport("rapl", False, True, "may not be read", "run as root", None),
        SourceReport("ina2xx", False, False, "is not there", "", None),
    )
    sampler = Sampler(SourceChoice((chip, other), reports), issues, lambda info: None)
    assert [(issue.key, issue.reason, issue.remedy) for issue in issues.all()] == [
        ("rapl", "may not be read", "run as root")
    ]
    sampler.close()
    assert chip.closed and other.closed


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_time_is_no_interval(seconds: float) -> None:
    bench = MeasurementWorker(scripted("chip", 4.0))
    bench.sample()
    assert bench.sample(seconds) is None
