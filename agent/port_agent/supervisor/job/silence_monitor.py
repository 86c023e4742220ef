"""Is a worker that says nothing still at work?

Its silence tells, and the processor time that it takes meanwhile.

A worker at work reports each step, and computes or checks what it pages in between. One that is frozen, deadlocked or
waits for a medium that never answers does neither.
"""

from dataclasses import dataclass

LONGEST_STEPS = 10.0
SHORTEST_S = 60.0
"""Silence is suspicious after so many steps of its own, and never earlier than this."""
WORKING_SHARE = 0.01
"""Of one processor: whoever takes less does not compute."""
RESTART_AFTER = 2.0
"""A worker that is stuck for this multiple of the suspicious time is killed, and started again as after a crash."""


LONGEST_LOOK_S = 5.0
"""A look that comes later counts as so much silence: the supervisor was held up itself, and has not heard yet."""


@dataclass(slots=True)
class SilenceMonitor:
    """How long a worker has given no sign of life, by looks about once a second."""

    looked_s: float
    """On the monotonic clock."""
    cpu_s: float = 0.0
    """What the worker had computed in all at its last sign of life."""
    silent_s: float = 0.0
    stuck: bool = False

    def note(self) -> None:
        """Take in that the worker said something, or that it was not meant to work."""
        self.silent_s, self.stuck = 0.0, False

    def look(self, now_s: float, cpu_s: float, step_s: float | None) -> bool:
        """Judge by the processor time that it has taken in all; return whether it is to be killed."""
        self.silent_s += min(now_s - self.looked_s, LONGEST_LOOK_S)
        self.looked_s = now_s
        if cpu_s - self.cpu_s > WORKING_SHARE * max(self.silent_s, 1.0):
            self.cpu_s = cpu_s
            self.note()
        allowed_s = max(SHORTEST_S, LONGEST_STEPS * (step_s or 0.0))
        self.stuck = self.silent_s > allowed_s
        return self.silent_s > RESTART_AFTER * allowed_s
