"""What each stage took: time is booked on the one that was under way."""

import pytest

from port_agent.planning.stage_clock import StageClock, StageTime


def test_time_is_booked_on_the_stage_that_was_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = ((10.0, 1.0), (12.0, 2.0), (15.0, 2.5), (16.0, 4.5), (17.0, 5.0), (18.0, 5.0))
    ticks = iter([StageTime(*clock) for clock in clocks])
    monkeypatch.setattr("port_agent.planning.stage_clock._clocks", lambda: next(ticks))
    reported = []
    clock = StageClock(lambda stage, share: reported.append((stage, share)), "capture")
    clock("capture", 1.0)
    clock("plan", 0.5)
    clock("capture", 1.0)
    clock("plan", 1.0)
    assert clock.taken() == {"capture": StageTime(6.0, 2.0), "plan": StageTime(2.0, 2.0)}
    assert reported == [("capture", 1.0), ("plan", 0.5), ("capture", 1.0), ("plan", 1.0)]
