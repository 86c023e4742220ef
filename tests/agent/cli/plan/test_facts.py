"""What is said of a bundle."""

from pathlib import Path
from typing import Any

import pytest

from port_agent.cli import main
from port_agent.cli.plan.facts import _overhead
from tests.agent.cli.plan.small_script import SCRIPT


@pytest.mark.process
def test_plan_says_what_it_made(planned: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = planned
    assert facts["budget_bytes"] == 700 << 20
    assert 0 < facts["measured_peak_bytes"] <= facts["budget_bytes"]
    assert facts["planned_peak_bytes"] <= facts["budget_bytes"]
    assert (facts["threads"], list(facts["step_s_by_threads"]), facts["steps"]) == (1, ["1"], 6)
    assert facts["limits"]["charging"] == ["22:00", "07:00"] and facts["limits"]["written_bytes"] == 20 << 20
    assert 0.0 < facts["limits"]["step_s"] <= 27 * 3600 / 6 and facts["limits"]["deadline_at"] > 0.0
    assert sorted(p.name for p in folder.iterdir() if not p.name.startswith("__")) == [
        "job.port",
        "model.lp",
        "train.py",
    ]


def test_how_long_a_medium_lasts_that_does_not_wear_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ("--ram", "700M", "--threads", "1", "--flash-life", "3y", "--medium", "disk")
    assert main(["plan", str(script), *words]) == 2
    assert "does not wear out a disk that turns; name the --medium" in capsys.readouterr().err


def test_the_price_of_wear_is_told_apart_from_joules_that_are_spent() -> None:
    facts = {
        "overhead_joules": 586.72,
        "wear_joules": 585.0,
        "bound_joules": 0.679,
        "gap": 0.99,
        "fine_bound_joules": None,
    }
    assert _overhead(facts) == (
        "1.72 J per step beyond keeping everything, and 585.00 J charged for the wear of written bytes; no plan of "
        "these stages needs less than 679.00 mJ, wear included (gap 99%)"
    )
    free = facts | {"overhead_joules": 1.0, "wear_joules": 0.0, "bound_joules": None}
    assert _overhead(free) == "1.00 J per step beyond keeping everything; no bound proven for these stages"
