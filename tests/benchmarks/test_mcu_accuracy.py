"""What the accuracy benchmark reports: differences within seeds, and how sure they are."""

from __future__ import annotations

import pytest

from benchmarks.mcu_accuracy import paired_difference


def test_the_error_is_that_of_differences_within_seeds() -> None:
    difference, error = paired_difference([0.9, 0.5, 0.7], [0.8, 0.4, 0.3])
    assert difference == pytest.approx(20.0)
    assert error == pytest.approx(10.0)  # differences of 10, 10 and 40 points: deviation 17.3, over the root of 3
    assert paired_difference([0.9, 0.5], [0.8, 0.4]) == pytest.approx((10.0, 0.0))


def test_one_seed_has_no_error() -> None:
    assert paired_difference([0.9], [0.8]) == (pytest.approx(10.0), None)
