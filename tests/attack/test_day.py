"""A day of a daemon leaves no job lost, and holds at its end what it held after an hour."""

from pathlib import Path

import pytest

from tests.attack.day import attack_hours
from tests.attack.outcome import Survived


@pytest.mark.long
def test_a_day(tmp_path: Path, survived: Survived) -> None:
    survived(attack_hours(tmp_path, 24, seed=1))
