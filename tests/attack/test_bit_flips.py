"""A flipped bit keeps no agent from starting, loses no job and changes none."""

from pathlib import Path

import pytest

from tests.attack.bit_flips import (
    attack_boot_files,
    attack_bundle,
    attack_daemon_files,
    attack_inbox,
    attack_job_store,
    attack_kept_plans,
    attack_ledger,
    attack_result,
    attack_training_state,
)
from tests.attack.outcome import Survived


@pytest.mark.parametrize("closed", [True, False])
def test_flips_in_the_job_store(scratch: Path, closed: bool, survived: Survived) -> None:
    outcome = attack_job_store(scratch, closed=closed, every_bytes=701)
    assert outcome.tried > 50
    survived(outcome)


def test_flips_in_the_ledger(scratch: Path, survived: Survived) -> None:
    outcome = attack_ledger(scratch, every_bytes=701)
    assert outcome.tried > 30
    survived(outcome)


def test_flips_in_every_byte_of_what_rounds_took(scratch: Path, survived: Survived) -> None:
    outcome = attack_inbox(scratch, every_bytes=1)
    assert "trained on again and said" in outcome.notes
    survived(outcome)


def test_flips_in_the_result_of_a_job(scratch: Path, survived: Survived) -> None:
    outcome = attack_result(scratch, every_bytes=3)
    assert outcome.tried > 50
    survived(outcome)


def test_flips_in_every_byte_of_what_says_at_boot_which_version_runs(scratch: Path, survived: Survived) -> None:
    outcome = attack_boot_files(scratch, every_bytes=1)
    assert outcome.tried > 200 and "nothing lost" in outcome.notes
    survived(outcome)


def test_flips_in_every_byte_of_a_kept_plan(scratch: Path, monkeypatch: pytest.MonkeyPatch, survived: Survived) -> None:
    outcome = attack_kept_plans(scratch, monkeypatch.setenv, every_bytes=1)
    assert outcome.tried > 50
    survived(outcome)


@pytest.mark.long
@pytest.mark.parametrize("closed", [True, False])
def test_a_flip_in_every_few_bytes_of_the_job_store(scratch: Path, closed: bool, survived: Survived) -> None:
    outcome = attack_job_store(scratch, closed=closed, every_bytes=8, seed=2)
    survived(outcome)


@pytest.mark.long
def test_a_flip_in_every_few_bytes_of_the_ledger(scratch: Path, survived: Survived) -> None:
    outcome = attack_ledger(scratch, every_bytes=8, seed=2)
    survived(outcome)


@pytest.mark.long
def test_a_flip_in_every_few_bytes_of_what_else_a_daemon_keeps(scratch: Path, survived: Survived) -> None:
    outcome = attack_daemon_files(scratch, every_bytes=16, seed=2)
    survived(outcome)


@pytest.mark.long
def test_a_flip_in_every_few_bytes_of_a_bundle(scratch: Path, survived: Survived) -> None:
    outcome = attack_bundle(scratch, every_bytes=16, seed=2)
    survived(outcome)


@pytest.mark.long
def test_a_flip_in_every_few_bytes_of_a_training_jobs_state(scratch: Path, survived: Survived) -> None:
    outcome = attack_training_state(scratch, every_bytes=512, seed=2)
    assert "recovered" in outcome.notes
    survived(outcome)
