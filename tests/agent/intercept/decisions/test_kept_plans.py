"""Plans in the user's cache: found again for the same step, budget and medium, never in the way."""

import os
from pathlib import Path

import pytest

from port_agent.intercept.decisions.kept_plans import KeptPlan, forget_plan, keep_plan, plan_name, read_plan

PLAN = KeptPlan("milp", 1.5, [(0, 3, 1, False), (1, 0, 2, True)], [(0, 2)], (45e6, 25e6))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep plans below the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "port-agent" / "plans"


def test_a_plan_is_found_again_until_it_is_forgotten() -> None:
    assert read_plan("name") is None
    keep_plan("name", PLAN)
    assert read_plan("name") == PLAN
    forget_plan("name")
    assert read_plan("name") is None
    forget_plan("name")


def test_the_name_tells_steps_and_budgets_apart() -> None:
    names = {
        plan_name(segments, budget, deadline_s, written_bytes, wear, whole_process=whole)
        for segments in ([1, -2], [-2, 1], [1])
        for budget in (600, 601)
        for deadline_s, written_bytes in ((None, None), (1.0, None), (None, 1))
        for wear in (0.0, 5e-6)
        for whole in (True, False)
    }
    assert len(names) == 72


def test_a_plan_is_for_its_medium() -> None:
    assert PLAN.suits((45e6, 25e6)) and PLAN.suits((90e6, 20e6))
    assert not PLAN.suits((1e9, 25e6)) and not PLAN.suits((45e6, 5e6))


def test_segments_that_do_not_exist_are_passed_over() -> None:
    (only,) = PLAN.segment_plans(1)
    assert only.leaving == {3: {1: False}} and only.remade == {2}


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for cache in (str(tmp_path / "file"), ""):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        monkeypatch.delenv("HOME", raising=False)
        keep_plan("name", PLAN)
        assert read_plan("name") is None


def test_the_oldest_plans_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("port_agent.intercept.decisions.kept_plans._PLANS_KEPT", 2)
    for age, name in enumerate(("newest", "older", "oldest")):
        keep_plan(name, PLAN)
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    keep_plan("last", PLAN)
    assert {path.name for path in folder.iterdir()} == {"newest", "last"}
