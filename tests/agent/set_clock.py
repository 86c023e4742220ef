"""A clock whose hands a test sets."""

from dataclasses import dataclass


@dataclass
class SetClock:
    """Stands still until a test moves it; `wall` may be set apart from the span, as NTP or a person does."""

    now: float = 1000.0
    wall: float = 1_800_000_000.0
    slept: float = 0.0

    def pass_time(self, seconds: float) -> None:
        """Move both hands."""
        self.now += seconds
        self.wall += seconds

    def monotonic_s(self) -> float:
        """Return the span."""
        return self.now

    def wall_s(self) -> float:
        """Return Unix time."""
        return self.wall

    def uptime_s(self) -> float:
        """Return the span, and how long the machine has slept besides."""
        return self.now + self.slept
