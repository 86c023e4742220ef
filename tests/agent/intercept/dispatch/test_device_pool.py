"""Programs within a budget of a device's memory, on the simulated card (`tests/simulated_card.py`)."""

import json
import signal
from typing import Any

import pytest

from tests.card_programs import BRIEF_MUTATIONS, MUTATIONS
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


def test_memory_that_came_back_is_given_to_others_after_every_stream_of_the_program() -> None:
    """What a program recorded on the memory before it left, and the stream that it was asked for on,
    count for what came back, too.
    """
    facts, _ = _said("streams_share_memory")
    assert facts == {bounds: [True, 0, True] for bounds in ("operands", "half", "process")}


def test_operators_over_numbers_that_do_not_fit_together_run_in_tiles_with_the_bits_of_the_whole() -> None:
    facts, _ = _said("too_large_together")
    for name, most in {"process": 30 << 20, "tensors": 30 << 20}.items():
        same, races, tiled, peak_bytes = facts[name]
        assert same and races == 0 and peak_bytes <= most, name
        assert {"aten.mul.Tensor", "aten.addcmul.default"} <= set(tiled), name


def test_an_operand_of_which_the_cpu_reads_the_shape_alone_comes_back_for_a_device() -> None:
    facts, _ = _said("asks_for_a_shape")
    assert facts == {"same": True, "races": 0}


def test_an_illegal_address_ends_with_the_budget_and_the_remedy() -> None:
    facts, _ = _said("illegal_address")
    said, note = facts["said"]
    assert "illegal memory access" in said and facts["after"] == 4000.0
    assert (
        "card:0 has a budget (--gpu-tensors 4.0 KiB)" in note
        and "data_ptr()" in note
        and "older than the budget" in note
    )


def test_what_the_device_refuses_runs_once_more_with_all_else_away_or_is_named() -> None:
    facts, said = _said("memory_runs_out")
    assert (
        said.count("did not fit on card:0") == 1
        and facts["ran again"] >= 1
        and "were reserved without a tensor" in said
    )
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
    """By other bits, by an order that the card says was violated, by its sums, or by the end of who
    uses memory that is not held.
    """
    done = run_forked("tests.card_programs", "mutated", left_out)
    assert done.returncode in (0, -signal.SIGSEGV), done.stderr
    assert done.returncode or json.loads(done.stdout)["noticed"] or "written by something other" in done.stderr, (
        left_out
    )


@pytest.mark.parametrize("left_out", BRIEF_MUTATIONS)
def test_what_one_program_is_enough_for_is_noticed(left_out: str) -> None:
    done = run_forked("tests.card_programs", "mutated_briefly", left_out)
    assert done.returncode in (0, -signal.SIGSEGV), done.stderr
    assert done.returncode or json.loads(done.stdout)["noticed"], left_out


def test_nothing_is_noticed_where_nothing_is_left_out() -> None:
    facts, said = _said("mutated", "nothing")
    assert not facts["noticed"] and not said
    facts, _ = _said("mutated_briefly", "nothing")
    assert not facts["noticed"] and facts["plain"] == 0
