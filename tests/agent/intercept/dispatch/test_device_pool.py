"""Programs within a budget of a device's memory, on the simulated card (`tests/simulated_card.py`)."""

import json
import signal
from typing import Any

import pytest

from tests.card_programs import MUTATIONS
from tests.forked import run_forked
from tests.simulated_card import library, missing

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    library()


def _said(function: str, *words: str) -> tuple[dict[str, Any], str]:
    done = run_forked("tests.card_programs", function, *words)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts, done.stderr


def test_training_within_a_budget_leaves_the_bits_of_training_without() -> None:
    facts, _ = _said("budgets_leave_the_bits")
    plain_peak = facts.pop("plain_peak")
    for name, found in facts.items():
        assert found["same"] and found["same_streams"] and found["races"] == 0, name
        assert found["moved"] > 0 and found["left"] < 4096, name
    assert facts["both"]["paged"] > 0 and facts["both"]["host_peak"] < plain_peak
    assert facts["both"]["over"] > facts["half"]["over"]


def test_what_the_device_refuses_runs_once_more_with_all_else_away_or_is_named() -> None:
    facts, _ = _said("memory_runs_out")
    held = [float(k) for k in range(12)]
    assert facts["fits alone"] == [2.0 * 3 * (1 << 17), held] and facts["after"] == held and facts["races"] == 0
    for name, operator in {"never fits": "aten::mul", "in place": "aten::resize_"}.items():
        assert operator in facts[name] and "card_programs.py:" in facts[name] and "--gpu-ram 7.0 MiB" in facts[name]


def test_what_is_written_past_the_operators_is_kept_and_said_once_with_its_line() -> None:
    facts, said = _said("writes_past_operators")
    assert facts["total"] == 3005.0
    assert said.count("written by something other than an operator") == 1 and "card_programs.py:" in said


def test_memory_that_cannot_be_bounded_is_refused_by_name() -> None:
    facts, _ = _said("refusals")
    assert "shares the host's memory" in facts["unified"] and "torch.compile" in facts["compiled"]
    assert "cannot resize storages of MPS" in facts["mps"] and "one GPU, the first" in facts["second"]


@pytest.mark.parametrize("left_out", MUTATIONS)
def test_each_wait_copy_and_note_that_is_left_out_is_noticed(left_out: str) -> None:
    """By other bits, by an order that the card says was violated, by its sums, or by the end of who uses memory that is not held."""
    done = run_forked("tests.card_programs", "mutated", left_out)
    assert done.returncode in (0, -signal.SIGSEGV), done.stderr
    assert done.returncode or json.loads(done.stdout)["noticed"] or "written by something other" in done.stderr, (
        left_out
    )


def test_nothing_is_noticed_where_nothing_is_left_out() -> None:
    facts, said = _said("mutated", "nothing")
    assert not facts["noticed"] and not said
