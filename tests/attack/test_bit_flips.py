"""A flipped bit keeps no agent from starting, loses no job and changes none."""

from pathlib import Path

import pytest

from tests.attack.bit_flips import (
    attack_bundle,
    attack_daemon_files,
    attack_inbox,
    attack_job_store,
    attack_ledger,
    attack_training_state,
)
from tests.attack.outcome import Survived


@pytest.mark.parametrize("closed", [True, False])
def test_flips_in_the_job_store(tmp_path: Path, closed: bool, survived: Survived) -> None:
    outcome = attack_job_store(tmp_path, closed=closed, every_bytes=701)
    assert outcome.tried > 50
    survived(outcome)


def test_flips_in_the_ledger(tmp_path: Path, survived: Survived) -> None:
    outcome = attack_ledger(tmp_path, every_bytes=701)
    assert outcome.tried > 30
    survived(outcome)


def test_flips_in_every_byte_of_what_rounds_took(tmp_path: Path, survived: Survived) -> None:
    outcome = attack_inbox(tmp_path, every_bytes=1)
    assert "trained on again and said" in outcome.notes
    survived(outcome)


@pytest.mark.long
@pytest.mark.parametrize("closed", [True, False])
def test_a_flip_in_every_few_bytes_of_the_job_store(tmp_path: Path, closed: bool, survived: Survived) -> None:
    outcome = attack_job_store(tmp_path, closed=closed, every_bytes=8, seed=2)
    survived(outcome)


@pytest.mark.long
def test_a_flip_in_every_few_bytes_of_the_ledger(tmp_path: Path, survived: Survived) -> None:
    outcome = attack_ledger(tmp_path, every_bytes=8, seed=2)
    survived(outcome)


@pytest.mark.long
def test_a_flip_in_every_few_bytes_of_what_else_a_daemon_keeps(tmp_path: Path, survived: Survived) -> None:
    outcome = attack_daemon_files(tmp_path, every_bytes=16, seed=2)
    survived(outcome)


@pytest.mark.long
def test_a_flip_in_every_few_bytes_of_a_bundle(tmp_path: Path, survived: Survived) -> None:
    outcome = attack_bundle(tmp_path, every_bytes=16, seed=2)
    survived(outcome)


@pytest.mark.long
def test_a_flip_in_every_few_bytes_of_a_training_jobs_state(tmp_path: Path, survived: Survived) -> None:
    outcome = attack_training_state(tmp_path, every_bytes=512, seed=2)
    assert "recovered" in outcome.notes
    survived(outcome)
