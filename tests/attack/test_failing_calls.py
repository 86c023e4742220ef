"""Whichever system call fails, no acknowledged job is lost and a resumed run has the bits of an undisturbed one."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.attack.failing_calls import attack_every_call
from tests.attack.outcome import Survived

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD and a C compiler"
)


def test_some_calls_of_the_job_store(scratch: Path, survived: Survived) -> None:
    outcome = attack_every_call("store", scratch, 41)
    assert outcome.tried >= 10
    survived(outcome)


@pytest.mark.long
@pytest.mark.parametrize("name", ["store", "daemon", "train"])
def test_every_call(scratch: Path, name: str, survived: Survived) -> None:
    survived(attack_every_call(name, scratch, 1, processes=os.cpu_count() or 1))
