"""What others may know about an agent's activity.

This is a separate module because the supervisor loads it even with discovery off.
"""

from enum import Enum


class PublicState(Enum):
    """The activity in general terms: never which job, nor why it waits."""

    IDLE = "idle"
    TRAINING = "training"
    PAUSED = "paused"
    """There is work, but it waits."""
