"""What others may know of what an agent does.

A module of its own: the supervisor carries it even with discovery off.
"""

from enum import Enum


class PublicState(Enum):
    """Never which job, nor why it waits."""

    IDLE = "idle"
    TRAINING = "training"
    PAUSED = "paused"
    """There is work, and it waits."""
