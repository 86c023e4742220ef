"""Fine-tunings on a device: on the simulated card, within a budget of its memory beside themselves without one."""

import json
from pathlib import Path

import pytest
import torch

from port_agent.backend.base import DeviceAbsentError
from port_agent.finetuning.inputs.on_device import (
    begin_on_device,
    forked_random,
    on_host,
    random_states,
    set_random_states,
)
from port_planner.ir.device_kinds import CPU
from tests.card_programs import FINETUNINGS
from tests.forked import run_forked
from tests.simulated_card import library, missing


def test_generators_are_restored() -> None:
    states = random_states(CPU)
    expected = torch.rand(3)
    set_random_states(CPU, states)
    with forked_random(CPU):
        torch.rand(5)
    assert torch.equal(torch.rand(3), expected)


def test_values_go_to_the_host_with_everything_else_as_it_was() -> None:
    value = {"state": {0: {"step": torch.ones(())}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
    assert on_host(value) == value


def test_the_cpu_is_left_as_it_is_and_an_unknown_device_is_named() -> None:
    begin_on_device(CPU)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(DeviceAbsentError, match="'abacus'"):
        begin_on_device("abacus")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_within_a_budget_of_the_device_and_with_a_stop_the_result_is_the_same_to_the_bit(tmp_path: Path) -> None:
    library()
    done = run_forked("tests.card_programs", "finetuned", str(tmp_path))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts.keys() == FINETUNINGS.keys()
    for name, found in facts.items():
        assert found["bits"] == [True] and found["losses"] and found["left"] == [True, False], name
        assert found["races"] == 0 and found["moved"] > 0 and found["kept on"] == ["cpu"], name
