"""The date of a run is kept while it has something to go on from."""

import datetime
from pathlib import Path

import pytest

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.inputs.run_date import date_of_run, forget_date, keep_date, state_folder


def test_the_date_is_kept_and_forgotten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    today = datetime.date.today().isoformat()
    assert date_of_run(out) == today
    state_folder(out).mkdir()
    keep_date(out, "")
    assert date_of_run(out) == today
    keep_date(out, "2025-03-09")
    assert date_of_run(out) == "2025-03-09"
    forget_date(out)
    forget_date(out)
    assert date_of_run(out) == today


def test_a_damaged_date_is_named(tmp_path: Path) -> None:
    state_folder(tmp_path / "out").mkdir()
    keep_date(tmp_path / "out", "yesterday")
    with pytest.raises(FinetuneError, match=r"date is damaged .*; give the date of the run: --date"):
        date_of_run(tmp_path / "out")
