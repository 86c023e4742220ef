"""The learning rate over the updates: a linear warm-up, then the schedule. Torch-free."""

import enum
import math


class RateSchedule(enum.StrEnum):
    """How the rate changes after the warm-up: it falls to 0 linearly or as a half cosine, or stays constant."""

    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"


def rate_share(schedule: RateSchedule, update: int, updates: int, warm_up: float) -> float:
    """Return the share of the learning rate in an update, counted from 0.

    `warm_up`: the share of the updates in which the rate rises.
    """
    warm = max(1, round(updates * warm_up))
    risen = (update + 1) / warm
    left = (updates - update) / max(1, updates - warm + 1)
    if schedule is RateSchedule.LINEAR:
        return min(risen, left)
    if schedule is RateSchedule.COSINE:
        return min(risen, (1 - math.cos(math.pi * min(1.0, left))) / 2)
    return min(risen, 1.0)
