"""A loop that was held up says so."""

from port_agent.health.conditions import HealthBoard
from port_agent.supervisor.stall_monitor import StallMonitor


class HandClock:
    """A clock that the test sets."""

    now_s = 1000.0

    def monotonic_s(self) -> float:
        """Return the test's time."""
        return self.now_s

    wall_s = uptime_s = monotonic_s


def test_a_late_look_is_a_health_item_and_a_rest_that_was_planned_is_none() -> None:
    health, clock = HealthBoard(), HandClock()
    watch = StallMonitor(health, clock)
    watch.looked()
    watch.rests(30.0)
    clock.now_s += 30.5
    watch.looked()
    assert not health.holds("loop-stalled")
    watch.rests(1.0)
    clock.now_s += 13.0
    watch.looked()
    (item,) = health.items(clock.now_s)
    assert item.text == "its event loop was blocked for 12 s"
