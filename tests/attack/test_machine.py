"""A job leaves when others need the memory, and outlives sleep and clocks that are set,
with the bits of a quiet run.
"""

import shutil
import sys
from pathlib import Path

import pytest

from tests.attack.machine import attack_memory, attack_sleep, available_bytes
from tests.attack.outcome import Survived

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and signals of Linux")]
ROOM_BYTES = 4 << 30


def test_another_process_eats_the_memory(tmp_path: Path, survived: Survived) -> None:
    if available_bytes() < ROOM_BYTES:
        pytest.skip("needs 4 GiB of free memory to take half of")
    survived(attack_memory(tmp_path, 3))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_machine_sleeps_and_its_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: Survived
) -> None:
    survived(attack_sleep(tmp_path, monkeypatch.setenv, stopped_s=10.0))
