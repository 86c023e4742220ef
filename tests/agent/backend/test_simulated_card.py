"""The simulated card (`tests/simulated_card.py`) is what the tests of device memory believe it is."""

import json
import os
import signal
from typing import Any

import pytest

from tests.forked import run_forked
from tests.simulated_card import UNIFIED, library, missing

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    library()


def _said(function: str) -> dict[str, Any]:
    done = run_forked("tests.card_programs", function)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_it_computes_what_the_cpu_does_and_keeps_nothing() -> None:
    facts = _said("computes_as_the_cpu")
    assert facts["card"] == facts["cpu"] and len(set(facts["cpu"])) == 3
    assert facts["left"] == 0 and facts["races"] == 0


def test_its_storages_resize_and_memory_beyond_the_cap_is_refused() -> None:
    facts = _said("memory_is_unkind")
    assert facts["emptied"] == 0 and not facts["garbage"] and facts["longer"]
    assert "out of memory" in facts["refused"] and "4194304 bytes" in facts["refused"]


def test_a_copy_without_one_of_its_waits_brings_garbage() -> None:
    facts = _said("order_is_needed")
    assert facts.pop("all waits") == [True, 0]
    assert facts.pop("not for the source") == [False, 1]
    assert [right for right, _ in facts.values()] == [False, False], facts


def test_an_operator_that_does_not_wait_for_a_copy_reads_garbage() -> None:
    facts = _said("other_streams_wait")
    assert (facts["early"], facts["late"], facts["races"]) == (False, True, 1)


@pytest.mark.parametrize("unified", [False, True])
def test_the_host_reaches_its_memory_where_that_is_unified_alone(unified: bool) -> None:
    environment = {**os.environ, **({UNIFIED: "1"} if unified else {})}
    done = run_forked("tests.card_programs", "host_touches_it", environment=environment)
    if unified:
        assert json.loads(done.stdout) == {"unified": True, "read": 1.0}
    else:
        assert done.returncode == -signal.SIGSEGV
