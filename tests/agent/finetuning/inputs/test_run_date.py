"""The date of a run and its length are kept while it has something to go on from."""

import datetime
from pathlib import Path

import pytest

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.inputs.run_date import (
    date_of_run,
    forget_run,
    keep_for_resuming,
    length_of_run,
    state_folder,
)


def test_the_date_is_kept_and_forgotten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    today = datetime.date.today().isoformat()
    assert date_of_run(out) == today
    state_folder(out).mkdir()
    keep_for_resuming(out, "", 512)
    assert date_of_run(out) == today
    keep_for_resuming(out, "2025-03-09", 512)
    assert date_of_run(out) == "2025-03-09"
    forget_run(out)
    forget_run(out)
    assert date_of_run(out) == today


def test_a_damaged_date_is_named(tmp_path: Path) -> None:
    state_folder(tmp_path / "out").mkdir()
    keep_for_resuming(tmp_path / "out", "yesterday", 512)
    with pytest.raises(FinetuneError, match=r"date is damaged .*; give the date of the run: --date"):
        date_of_run(tmp_path / "out")


def test_the_length_is_kept_and_forgotten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert length_of_run(out) is None
    state_folder(out).mkdir()
    assert length_of_run(out) is None
    keep_for_resuming(out, "2025-03-09", 512)
    assert length_of_run(out) == 512
    (state_folder(out) / "answer_tokens").write_text("many")
    with pytest.raises(FinetuneError, match=r"answer_tokens is damaged .*; give the length of the run: --seq-len"):
        length_of_run(out)
    (state_folder(out) / "answer_tokens").unlink()
    assert length_of_run(out) == 0, "an older run kept the date alone"
    forget_run(out)
    assert length_of_run(out) is None
