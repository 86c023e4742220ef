"""A source that hangs holds up nobody: what it says is a gap by its name, until it answers again."""

import os
import threading
from pathlib import Path

import pytest

from port_agent.energy.sources import timely
from port_agent.energy.sources.power_source import (
    Coverage,
    Kind,
    PowerSource,
    SelfTest,
    SensorReading,
    SourceError,
    SourceInfo,
)
from port_agent.energy.sources.registry import EnergyConfig, open_sources
from port_agent.energy.sources.timely import ReadThread, ReadThreads, TimelySource
from tests.agent.energy.device_trees import ORIN_NANO, hwmon
from tests.waiting import until

INFO = SourceInfo("gauge", Kind.MEASURED, Coverage.WALL, "all", 0.1, 1.0)


class Gauge:
    """Answers when it is let."""

    info = INFO

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0
        self.closed = False
        self.error: SourceError | None = None

    def read(self, now_s: float) -> SensorReading:
        self.asked += 1
        self.answers.wait(60.0)
        if self.error is not None:
            raise self.error
        return SensorReading(now_s, watts=now_s)

    def self_test(self, now_s: float) -> SelfTest:
        self.answers.wait(60.0)
        return SelfTest(True, "works")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timely, "DEADLINE_S", 0.05)


def test_a_source_that_answers_is_as_without_a_thread() -> None:
    gauge = Gauge()
    source = ReadThreads().open("gauge", lambda: gauge)
    assert source.info is INFO and source.self_test(1.0).ok
    assert source.read(1.0) == SensorReading(1.0, watts=1.0)
    gauge.error = SourceError("gauge", "is broken", "mend it")
    with pytest.raises(SourceError, match="is broken"):
        source.read(2.0)
    gauge.error = None
    assert source.read(3.0) == SensorReading(3.0, watts=3.0)
    source.close()
    assert gauge.closed


def test_an_answer_that_is_late_is_taken_at_the_next_question() -> None:
    gauge = Gauge()
    source = TimelySource(gauge, ReadThread("gauge"), wait_s=0.0)
    with pytest.raises(SourceError, match="has not answered"):  # nothing is known yet
        gauge.answers.clear()
        source.read(1.0)
    gauge.answers.set()
    assert until(lambda: _read(source, 2.0)) == SensorReading(1.0, watts=1.0)
    gauge.answers.clear()
    assert source.read(3.0) == SensorReading(1.0, watts=1.0), "the one before, which is no newer interval"
    gauge.answers.set()
    assert until(lambda: (found := source.read(4.0)) != SensorReading(1.0, watts=1.0) and found) == SensorReading(
        3.0, watts=3.0
    )


def _read(source: PowerSource, now_s: float) -> SensorReading | None:
    try:
        return source.read(now_s)
    except SourceError:
        return None


def test_a_source_that_hangs_is_broken_until_it_answers(short: None) -> None:
    gauge, threads = Gauge(), ReadThreads()
    source = threads.open("gauge", lambda: gauge)
    source.read(1.0)
    gauge.answers.clear()
    until(lambda: _read(source, 2.0) is None or None)  # first the one before, then silence
    asked = gauge.asked
    for _ in range(20):
        assert _read(source, 3.0) is None
        with pytest.raises(SourceError, match="has not answered"):  # looked for again
            threads.open("gauge", lambda: gauge)
    assert gauge.asked == asked and not source.self_test(3.0).ok, "nobody else is sent after it"
    source.close()
    assert not gauge.closed, "it may not be closed under its reader"
    gauge.answers.set()
    assert until(lambda: _read(source, 4.0)) is not None
    assert threads.open("gauge", lambda: gauge).read(5.0) == SensorReading(5.0, watts=5.0)


def test_a_rail_that_is_a_fifo_holds_up_neither_the_start_nor_a_reading(tmp_path: Path, short: None) -> None:
    hwmon(tmp_path, "1-0040", ORIN_NANO)
    files = sorted(tmp_path.rglob("*_input"))
    (healthy,) = (
        source for source in open_sources(EnergyConfig(), None, tmp_path).sources if source.info.kind is Kind.MEASURED
    )
    assert healthy.read(1.0) is not None
    for file in files:
        file.unlink()
        os.mkfifo(file)
    until(lambda: _read(healthy, 2.0) is None or None)
    choice = open_sources(EnergyConfig(), None, tmp_path)
    assert all(source.info.kind is not Kind.MEASURED for source in choice.sources)
    assert any("has not answered" in report.text for report in choice.broken)
    for file in files:
        os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))
