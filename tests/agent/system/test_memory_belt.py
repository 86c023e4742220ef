"""The hard belt of a foreground program."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from agent.system.memory_belt import scope_command

LIMITED = """
import resource
from agent.system.memory_belt import limit_data, widen_data_limit
limit_data({0})
before = resource.getrlimit(resource.RLIMIT_DATA)
widen_data_limit(1 << 20)
print(*before, *resource.getrlimit(resource.RLIMIT_DATA))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
def test_the_soft_limit_is_lowered_and_widened_within_the_hard_one() -> None:
    code = LIMITED.format(300 << 20)
    hard = 300 << 20 | 1 << 19

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, preexec_fn=bound)
    assert [int(word) for word in done.stdout.split()] == [300 << 20, hard, hard, hard]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED.format(1 << 40)], capture_output=True, text=True, check=True, preexec_fn=bound
    )
    assert [int(word) for word in done.stdout.split()] == [hard] * 4


def test_no_scope_where_no_manager_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert scope_command(1 << 30, {}) == []
