"""Samples with targets, for boards that learn numbers: rows that contain both, and the share of the
targets that a model explains.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from port_planner.base.errors import PortError

MIN_SPREAD = 1e-12
"""Least variance; a smaller one counts as this."""


class TargetError(PortError):
    """The targets do not belong to their samples, or are not finite real numbers."""


def with_targets(rows: NDArray[np.int8], targets: NDArray[np.generic], count: int) -> NDArray[np.int8]:
    """Return rows [N, bytes] with the `count` targets of each sample appended in fp32, as a board takes them.

    Raises TargetError unless there are `count` finite real numbers for each sample.
    """
    values = np.asarray(targets)
    numbers = values.reshape(len(values), -1) if values.size else values.reshape(0, count)
    if not values.size or values.dtype.kind not in "fiub" or numbers.shape != (len(rows), count):
        raise TargetError(
            f"targets of shape {list(values.shape)} and type {values.dtype} for {len(rows)} samples; give {count} real "
            "numbers for each sample"
        )
    with np.errstate(over="ignore"):
        reals = numbers.astype("<f4")
    wrong = int(reals.size - np.isfinite(reals).sum())
    if wrong:
        raise TargetError(f"{wrong:,} of {reals.size:,} targets are not finite in fp32; leave those samples out")
    return np.concatenate([rows, np.ascontiguousarray(reals).view(np.int8)], axis=1)


def targets_in(rows: NDArray[np.int8], count: int) -> NDArray[np.float32]:
    """Return the targets [N, count] of rows that `with_targets` made."""
    tail = np.ascontiguousarray(rows[:, rows.shape[1] - 4 * count :])
    return tail.view("<f4").astype(np.float32)


def explained_share(loss: float, rows: NDArray[np.int8], count: int) -> float:
    """Return the share of the targets' variance that a model with this mean squared error explains.

    It is at most 1. Below 0, the mean of the targets would be a better answer than the model's.
    """
    spread = float(targets_in(rows, count).astype(np.float64).var(axis=0).mean())
    return 1.0 - loss / max(spread, MIN_SPREAD)


__all__ = ["TargetError", "explained_share", "targets_in", "with_targets"]
