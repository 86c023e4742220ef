"""A step that does not repeat on its device is refused by the operator's name, from the table
or from running it twice.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_agent.prepare import reference
from port_agent.prepare.reference import with_expected_results
from port_agent.prepare.repeatable import OperatorDigests, UnrepeatableError, not_repeated, reordered_in
from port_planner import make_bundle
from port_planner.ir.devices import exactness
from port_planner.job import TrainingJob
from port_planner.job_device import move
from port_planner.plain_steps import plain_losses
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process


def small_job() -> TrainingJob:
    SimBackend()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    data = [torch.randn(8, 4), torch.randint(0, 3, (8,))]
    job = TrainingJob(
        model, lambda m, x, y: functional.cross_entropy(m(x), y), torch.optim.SGD(model.parameters(), lr=0.1), data, 4
    )
    move(job, NAME)
    return job


def test_an_operator_of_the_table_is_refused_by_name_unless_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_bundle.prepare(small_job()).graphs.values()
    assert reordered_in(graphs, allowed=False) == ()
    monkeypatch.setattr(exactness, "REORDERED", {NAME: {"threshold_backward": "a test"}})
    with pytest.raises(UnrepeatableError, match=r"on sim .*threshold_backward \(a test\).*--allow reordered"):
        reordered_in(graphs, allowed=False)
    assert reordered_in(graphs, allowed=True) == ("threshold_backward",)
    monkeypatch.setattr(exactness, "REORDERED", {})
    assert reordered_in(graphs, allowed=True) == ("operators that are in no table",)


def test_plain_pytorch_that_repeats_is_the_reference() -> None:
    captured = with_expected_results(make_bundle.prepare(small_job()), 2)
    assert len(captured.reference.losses) == 2 and "sim beside" in captured.reference.processor


def test_plain_pytorch_that_does_not_repeat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, runs = make_bundle.prepare(small_job()), []

    def drifting(job: TrainingJob, data: Sequence[torch.Tensor], steps: int, *more: Any) -> Iterator[float]:
        runs.append(steps)
        yield from (loss * (1 + 1e-7 * len(runs)) for loss in plain_losses(job, data, steps, *more))

    monkeypatch.setattr(reference, "plain_losses", drifting)
    with pytest.raises(
        UnrepeatableError, match="different numbers when it ran the first steps again on sim: no operator"
    ):
        with_expected_results(captured, 1)
    assert len(runs) == 2


def test_the_first_operator_that_differs_is_named() -> None:
    job, calls = small_job(), []
    loss_fn = job.loss_fn

    def drifting(model: nn.Module, *batch: torch.Tensor) -> Any:
        calls.append(0)
        return loss_fn(model, *batch).mul(1 + 0.1 * len(calls))

    job.loss_fn = drifting
    assert "first in aten.mul" in str(not_repeated(job, list(job.data)))


def test_digests_are_of_bits() -> None:
    with OperatorDigests() as digests:
        torch.zeros(2).neg()
        torch.zeros(2) + 0
    (_, zero), (name, negative), *_ = digests.seen
    assert name == "aten.neg.default" and zero != negative
