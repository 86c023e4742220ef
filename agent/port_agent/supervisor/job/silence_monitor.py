"""Detect a worker that no longer works, by its silence and by how little CPU time it takes.

A healthy worker reports each step, and in between it computes or verifies the pages that it reads. A worker that is
frozen, deadlocked or waiting for a medium that never answers does none of this.
"""

from dataclasses import dataclass

LONGEST_STEPS = 10.0
SHORTEST_S = 60.0
"""Least seconds of suspicious silence. Otherwise, silence is suspicious after several of the worker's own steps."""
WORKING_SHARE = 0.01
"""Share of one processor below which a worker does not compute."""
RESTART_AFTER = 2.0
"""Multiple of the suspicious time after which a stuck worker is killed, and started again as after a crash."""


LONGEST_LOOK_S = 5.0
"""Longest silence in seconds that one look adds; a later look means that the supervisor itself was blocked."""


@dataclass(slots=True)
class SilenceMonitor:
    """Measures how long a worker has shown no sign of life, in looks about once a second."""

    looked_s: float
    """Time of the last look, in monotonic seconds."""
    cpu_s: float = 0.0
    """CPU seconds of the worker at its last sign of life."""
    silent_s: float = 0.0
    stuck: bool = False

    def note(self) -> None:
        """Record that the worker reported something, or was not supposed to work."""
        self.silent_s, self.stuck = 0.0, False

    def look(self, now_s: float, cpu_s: float, step_s: float | None) -> bool:
        """Judge by the total CPU time, and return whether the worker must be killed."""
        self.silent_s += min(now_s - self.looked_s, LONGEST_LOOK_S)
        self.looked_s = now_s
        if cpu_s - self.cpu_s > WORKING_SHARE * max(self.silent_s, 1.0):
            self.cpu_s = cpu_s
            self.note()
        allowed_s = max(SHORTEST_S, LONGEST_STEPS * (step_s or 0.0))
        self.stuck = self.silent_s > allowed_s
        return self.silent_s > RESTART_AFTER * allowed_s
