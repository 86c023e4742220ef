"""Unplugging a model of 100 million parameters loses the open step and not what was trained
since the last checkpoint.
"""

from pathlib import Path

import pytest

from port_agent.supervisor.job.runner import LAST_COMMIT_S
from tests.attack.leaving import unplug


@pytest.mark.long
def test_unplugging_a_large_model_loses_the_open_step(tmp_path: Path) -> None:
    figures = unplug(tmp_path, after_steps=5, within_s=LAST_COMMIT_S)
    print(figures)
    assert figures.parameters >= 100_000_000
    assert figures.resumed == figures.done and figures.done <= 6, "at most the step at hand was finished first"


@pytest.mark.long
def test_a_worker_without_time_leaves_at_once(tmp_path: Path) -> None:
    figures = unplug(tmp_path, after_steps=3, within_s=0.0)
    assert figures.resumed == 0 and figures.committed_bytes == 0
