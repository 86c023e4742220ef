"""Rows with targets: what a board reads behind each sample, and what is no target."""

from __future__ import annotations

import numpy as np
import pytest

from port_planner.base.targets import TargetError, explained_share, targets_in, with_targets

ROWS = np.arange(12, dtype=np.int8).reshape(4, 3)


def test_targets_lie_behind_each_sample_in_fp32() -> None:
    targets = np.array([[1.5, -2.0], [0.1, 3.0], [1e-40, 7.0], [0.0, -0.0]])
    rows = with_targets(ROWS, targets, 2)
    assert rows.shape == (4, 11) and (rows[:, :3] == ROWS).all()
    assert rows[0, 3:].tobytes() == np.array([1.5, -2.0], "<f4").tobytes()
    assert (targets_in(rows, 2) == targets.astype(np.float32)).all()
    assert (with_targets(ROWS, np.arange(4), 1) == with_targets(ROWS, np.arange(4.0)[:, None], 1)).all()


@pytest.mark.parametrize(
    ("targets", "count", "message"),
    [
        (np.zeros((4, 2)), 3, r"shape \[4, 2\] and type float64 for 4 samples; give 3 real"),
        (np.zeros((3, 1)), 1, r"shape \[3, 1\]"),
        (np.zeros(4, complex), 1, "complex128"),
        (np.array(["a"] * 4), 1, "give 1 real"),
        (np.array([0, np.nan, 1e39, 1]), 1, "2 of 4 targets are not finite in fp32"),
    ],
)
def test_what_is_no_target_is_refused(targets: np.ndarray, count: int, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        with_targets(ROWS, targets, count)
    with pytest.raises(TargetError, match="for 0 samples"):
        with_targets(ROWS[:0], np.zeros((0, count)), count)


def test_the_mean_explains_nothing_and_the_targets_everything() -> None:
    targets = np.array([[0.0, 10.0], [2.0, 30.0], [4.0, 20.0], [6.0, 40.0]])
    rows = with_targets(ROWS, targets, 2)
    assert explained_share(0.0, rows, 2) == 1.0
    assert explained_share(float(np.mean((targets - targets.mean(0)) ** 2)), rows, 2) == pytest.approx(0.0)
    assert explained_share(1.0, with_targets(ROWS, np.ones(4), 1), 1) < 0
