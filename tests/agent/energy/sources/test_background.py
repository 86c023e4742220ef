"""Slow and foreign sources: the newest reading, failures and silence, without holding anything up."""

import threading

import pytest

from port_agent.energy.sources.background import BackgroundSource
from port_agent.energy.sources.power_source import SensorReading, SourceError
from port_agent.system.clock import now_s
from tests.agent.energy.recordings import ScriptedSource
from tests.waiting import PATIENCE_S


class SlowSource(ScriptedSource):
    """A meter whose answer the test lets through."""

    def __init__(self) -> None:
        super().__init__("slow", period_s=0.01)
        self.answered = threading.Event()
        self.gate = threading.Event()
        self.failure: Exception | None = None
        self.gate.set()

    def read(self, now_s: float) -> SensorReading | None:
        """Wait for the gate, then answer or fail."""
        self.gate.wait()
        try:
            if self.failure:
                raise self.failure
            return SensorReading(now_s, watts=12.0)
        finally:
            self.answered.set()


def next_answer(source: SlowSource) -> None:
    """Wait until the thread has been answered twice, so that the first of them has been stored."""
    for _ in range(2):
        source.answered.clear()
        assert source.answered.wait(PATIENCE_S)


def test_newest_reading_and_failures() -> None:
    inner = SlowSource()
    source = BackgroundSource(inner)
    try:
        next_answer(inner)
        reading = source.read(now_s())
        assert reading is not None and reading.watts == 12.0
        other = source.read(5.0)
        assert other is not None and 4.0 < other.time_s <= 5.0, "stamped on the caller's clock"
        inner.failure = KeyError("voltage")
        next_answer(inner)
        with pytest.raises(SourceError, match="failed with KeyError"):
            source.read(now_s())
        inner.failure = SourceError("slow", "no route to host", "check the network")
        next_answer(inner)
        with pytest.raises(SourceError, match="no route to host"):
            source.read(now_s())
    finally:
        source.close()
    assert inner.closed


def test_silent_meter_is_stale_but_never_blocks() -> None:
    inner = SlowSource()
    inner.gate.clear()
    time_s = 100.0
    source = BackgroundSource(inner, lambda: time_s)
    try:
        assert source.read(5.0) is None
        time_s += 60
        with pytest.raises(SourceError, match="no answer for 60 s"):
            source.read(6.0)
    finally:
        inner.gate.set()
        source.close()
