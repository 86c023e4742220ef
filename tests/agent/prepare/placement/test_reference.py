"""The reference of a placed job is checked before it is believed: one by one on one device, its
operators are plain PyTorch.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from port_agent.prepare.placement.eager import EagerStep
from port_agent.prepare.placement.reference import with_placed_reference
from port_agent.prepare.repeatable import UnrepeatableError
from port_agent.training.comparison import MismatchError
from port_planner.ir.device_kinds import CPU
from port_planner.make_bundle import CapturedJob
from tests.agent.prepare.placement.placed_job import captured_job
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process


@pytest.fixture(scope="module")
def captured() -> CapturedJob:
    SimBackend().use_own_bits(True)
    return captured_job()


def all_on(captured: CapturedJob, kind: str) -> dict[str, tuple[str, ...]]:
    return {name: (kind,) * len(graph.ops) for name, graph in captured.graphs.items()}


def test_on_the_cpu_it_is_plain_pytorchs_and_on_a_device_with_bits_of_its_own_another(captured: CapturedJob) -> None:
    same = with_placed_reference(captured, captured.graphs, all_on(captured, CPU), CPU).reference
    assert replace(same, placed=False) == captured.reference
    other = with_placed_reference(captured, captured.graphs, all_on(captured, NAME), NAME).reference
    assert other.losses != same.losses and other.checksums.keys() == same.checksums.keys()
    nothing = replace(captured, reference=replace(captured.reference, losses=()))
    assert with_placed_reference(nothing, captured.graphs, {}, NAME) is nothing


def test_operators_that_are_not_plain_pytorchs_are_refused(captured: CapturedJob) -> None:
    wrong = replace(captured, reference=replace(captured.reference, losses=("0x0p+0", "0x0p+0")))
    with pytest.raises(MismatchError, match="do not give plain PyTorch's numbers"):
        with_placed_reference(wrong, captured.graphs, all_on(captured, NAME), NAME)


def test_a_device_whose_numbers_change_is_refused(captured: CapturedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    run, runs = EagerStep.run, itertools.count()

    def drifting(step: EagerStep, *arguments: Any) -> torch.Tensor:
        found = run(step, *arguments)
        return found + next(runs) if NAME in step.kinds else found

    monkeypatch.setattr(EagerStep, "run", drifting)
    with pytest.raises(UnrepeatableError, match="different numbers when the first steps ran again"):
        with_placed_reference(captured, captured.graphs, all_on(captured, NAME), NAME)
