"""A bundle from a stranger is refused or trains: it never takes the worker out of its own memory."""

from pathlib import Path

import pytest

from tests.agent.jobs_small import small_bundle
from tests.attack.hostile_bundles import attack_with_bundles
from tests.attack.outcome import Survived


def test_bundles_with_a_random_change(tmp_path: Path, survived: Survived) -> None:
    outcome = attack_with_bundles(tmp_path, small_bundle(), seed=1, count=100)
    survived(outcome)
    assert "refused" in outcome.notes and "trained" in outcome.notes, outcome


@pytest.mark.long
def test_many_bundles_with_a_random_change(tmp_path: Path, survived: Survived) -> None:
    outcome = attack_with_bundles(tmp_path, small_bundle(), seed=2, count=5000)
    survived(outcome)
