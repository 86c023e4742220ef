"""How the learning rate goes over the updates: up in a line at first, then as the schedule says. Torch-free."""

import enum
import math


class RateSchedule(enum.StrEnum):
    """What the rate does once it is reached: it falls to 0 in a line or as half a wave, or stays."""

    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"


def rate_share(schedule: RateSchedule, update: int, updates: int, warm_up: float) -> float:
    """Return the share of the learning rate that an update has, counted from 0; `warm_up`: the share of the updates until it is reached."""
    warm = max(1, round(updates * warm_up))
    risen = (update + 1) / warm
    left = (updates - update) / max(1, updates - warm + 1)
    if schedule is RateSchedule.LINEAR:
        return min(risen, left)
    if schedule is RateSchedule.COSINE:
        return min(risen, (1 - math.cos(math.pi * min(1.0, left))) / 2)
    return min(risen, 1.0)
