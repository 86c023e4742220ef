"""Who stops a process that takes more of a device's memory is tried in a process of its own, and
its end is an answer, too.
"""

import signal
from pathlib import Path

import pytest

from port_agent.backend.enforcement import ALLOCATOR, ALLOWED, DATA, GROUP, KILLED, REFUSED, outcomes, tried
from port_planner.ir.device_kinds import CPU
from tests.simulated_device import NAME, UNSEEN, installed

BOUNDS = (ALLOCATOR, DATA)


@pytest.mark.process
def test_the_kernel_refuses_data_beyond_its_limit_and_the_cpu_has_no_limit_of_its_own() -> None:
    assert tried(CPU, BOUNDS) == {ALLOCATOR: ALLOWED, DATA: REFUSED}


@pytest.mark.long
def test_memory_that_the_kernel_does_not_count_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**installed(tmp_path), UNSEEN: "1"}.items():
        monkeypatch.setenv(name, value)
    assert tried(NAME, BOUNDS) == {ALLOCATOR: REFUSED, DATA: ALLOWED}


@pytest.mark.long
def test_a_group_without_a_limit_is_not_tried() -> None:
    found = tried(CPU, (GROUP,))[GROUP]
    assert found == "was not tested: this one's limit cannot be read" or found in (KILLED, ALLOWED)


@pytest.mark.parametrize("ended", [-signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGABRT])
def test_the_bound_that_a_process_did_not_answer_for_has_ended_it(ended: int) -> None:
    assert outcomes((GROUP,), ["begun"], ended) == {GROUP: KILLED}
    first, second = outcomes(BOUNDS, ["begun"], ended).values()
    assert first == KILLED and second.startswith("was not tested")
    assert outcomes(BOUNDS, ["begun", REFUSED], ended) == {ALLOCATOR: REFUSED, DATA: KILLED}


def test_a_process_that_never_began_says_nothing_of_a_bound() -> None:
    assert outcomes((GROUP,), [], -signal.SIGKILL)[GROUP].startswith(
        "was not tested: the test process ended with -9 before"
    )
    assert outcomes((GROUP,), ["begun"], 1) == {GROUP: "was not tested: the test process ended with 1"}
