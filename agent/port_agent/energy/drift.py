"""Compare a plan with reality.

If steps keep differing from the planned seconds or joules, reports the factor.
"""

from collections import deque
from dataclasses import dataclass

WINDOW_STEPS = 100
TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Ratio:
    """Planned and actual sums over a window of steps."""

    planned: float
    actual: float

    @property
    def factor(self) -> float:
        """Actual over planned."""
        return self.actual / self.planned

    @property
    def off(self) -> bool:
        """Whether they differ by more than the tolerance."""
        return abs(self.factor - 1) > TOLERANCE


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors by which the profile was wrong; None if it was right, or if nothing was planned or measured."""

    job: str
    plan: int
    steps: int
    time_factor: float | None
    energy_factor: float | None
    text: str
    """One line for the log."""

    def apply(self, step_s: float | None, step_joules: float | None) -> tuple[float | None, float | None]:
        """Return the planned figures of a step, of this plan or another from the same profile, after correction."""
        seconds = None if step_s is None else step_s * (self.time_factor or 1.0)
        joules = None if step_joules is None else step_joules * (self.energy_factor or 1.0)
        return seconds, joules


class DriftMonitor:
    """Watches one job's steps.

    After a correction the window restarts, measured against the corrected plan.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._plan: int | None = None
        self._time_factor = 1.0
        self._energy_factor = 1.0
        self._seconds = _Window()
        self._joules = _Window()

    @property
    def time(self) -> Ratio | None:
        """Ratio of measured to planned seconds over the window, for the plan as corrected so far.

        None before the first step with a plan.
        """
        return self._seconds.ratio()

    @property
    def energy(self) -> Ratio | None:
        """Ratio of measured to planned joules over the window, for the plan as corrected so far.

        None before the first planned, measured step.
        """
        return self._joules.ratio()

    def add(
        self, plan: int, planned_s: float | None, wall_s: float, planned_joules: float | None, joules: float | None
    ) -> Correction | None:
        """Record a step; return the correction if the window is full and the ratio is off
        by more than the tolerance.
        """
        if plan != self._plan:
            self._plan = plan
            self._time_factor = self._energy_factor = 1.0
            self._seconds.clear()
            self._joules.clear()
        if planned_s:
            self._seconds.add(planned_s * self._time_factor, wall_s)
        if planned_joules and joules is not None:
            self._joules.add(planned_joules * self._energy_factor, joules)
        time = self._seconds.full_and_off()
        energy = self._joules.full_and_off()
        return self._correct(time, energy) if time or energy else None

    def _correct(self, time: Ratio | None, energy: Ratio | None) -> Correction:
        parts = []
        if time:
            parts.append(f"{time.actual / WINDOW_STEPS:.3g} s instead of {time.planned / WINDOW_STEPS:.3g} s")
            self._time_factor *= time.factor
            self._seconds.clear()
        if energy:
            parts.append(f"{energy.actual / WINDOW_STEPS:.3g} J instead of {energy.planned / WINDOW_STEPS:.3g} J")
            self._energy_factor *= energy.factor
            self._joules.clear()
        factors = [f"{name} x{ratio.factor:.2f}" for name, ratio in (("time", time), ("energy", energy)) if ratio]
        text = (
            f"job {self._job}: over {WINDOW_STEPS} steps plan {(self._plan or 0) + 1} took {' and '.join(parts)} per "
            f"step; profile corrected ({', '.join(factors)}); the plans are compared again"
        )
        return Correction(
            self._job,
            self._plan or 0,
            WINDOW_STEPS,
            time.factor if time else None,
            energy.factor if energy else None,
            text,
        )


class _Window:
    """Sums of planned and actual values over the newest steps, updated at each step."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque()
        self._planned = self._actual = 0.0

    def add(self, planned: float, actual: float) -> None:
        """Add a step and drop the one that leaves the window."""
        self._pairs.append((planned, actual))
        self._planned += planned
        self._actual += actual
        if len(self._pairs) > WINDOW_STEPS:
            planned, actual = self._pairs.popleft()
            self._planned -= planned
            self._actual -= actual

    def clear(self) -> None:
        """Reset."""
        self._pairs.clear()
        self._planned = self._actual = 0.0

    def ratio(self) -> Ratio | None:
        """Return planned against actual; None before the first step."""
        return Ratio(self._planned, self._actual) if self._pairs else None

    def full_and_off(self) -> Ratio | None:
        """Return the ratio if the window is full and off by more than the tolerance."""
        if len(self._pairs) < WINDOW_STEPS:
            return None
        ratio = Ratio(self._planned, self._actual)
        return ratio if ratio.off else None
