"""Detect that the event loop was blocked: a look then comes much later than planned."""

from port_agent.health.conditions import HealthBoard
from port_agent.system.clock import Clock

STALL_S = 10.0
_SHOWN_S = 3600.0


class StallMonitor:
    """Compares the time at which each check runs with the planned time."""

    def __init__(self, health: HealthBoard, clock: Clock) -> None:
        self._health, self._clock = health, clock
        self._due_s: float | None = None

    def looked(self) -> None:
        """Report a check if it ran more than `STALL_S` late."""
        now_s = self._clock.monotonic_s()
        late_s = 0.0 if self._due_s is None else now_s - self._due_s
        if late_s > STALL_S:
            self._health.report("loop-stalled", now_s, self._clock.wall_s(), lasts_s=_SHOWN_S, stall=f"{late_s:.0f} s")
        self._due_s = now_s

    def rests(self, rest_s: float) -> None:
        """Record how long the loop intends to rest after this check."""
        if self._due_s is not None:
            self._due_s += rest_s
