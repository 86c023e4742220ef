"""A job goes where it was asked to: the model, the optimizer's parameters and what it keeps of them, the batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.job import JobError, TrainingJob
from port_planner.job_device import kind_of_job, move, on_device
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process


def job() -> TrainingJob:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = [torch.randn(8, 4), torch.randint(0, 3, (8,))]
    return TrainingJob(model, lambda m, x, y: functional.cross_entropy(m(x), y), optimizer, data, 4)


def step(made: TrainingJob) -> torch.Tensor:
    kind = kind_of_job(made)
    loss: torch.Tensor = made.loss_fn(made.model, *on_device((c[:4] for c in made.data), kind))
    loss.backward()
    made.optimizer.step()
    made.optimizer.zero_grad()
    return loss.detach().cpu()


def test_a_job_that_has_trained_goes_on_where_it_was_moved_to() -> None:
    SimBackend()
    stayed, moved = job(), job()
    assert kind_of_job(moved) == "cpu"
    assert torch.equal(step(stayed), step(moved))
    move(moved, NAME)
    assert kind_of_job(moved) == NAME
    assert {p.device.type for g in moved.optimizer.param_groups for p in g["params"]} == {NAME}
    assert {s["momentum_buffer"].device.type for s in moved.optimizer.state.values()} == {NAME}
    for _ in range(2):
        assert torch.equal(step(stayed), step(moved))
    move(moved, "cpu")
    assert torch.equal(step(stayed), step(moved))


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(JobError, match="unknown device 'tpu'"):
        move(job(), "tpu")
    if not torch.cuda.is_available():
        with pytest.raises(JobError, match=r"cannot be moved to cuda .*give a --device"):
            move(job(), "cuda")


def test_a_model_that_the_device_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's GPU has no numbers in double precision, and torch says so by a TypeError."""
    SimBackend()
    made = job()

    def without_doubles(*_: object, **__: object) -> None:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    monkeypatch.setattr(made.model, "_apply", without_doubles)
    with pytest.raises(JobError, match=r"cannot be moved to sim .*doesn't support float64"):
        move(made, NAME)


def test_a_model_on_two_devices_is_refused() -> None:
    SimBackend()
    made = job()
    made.model.add_module("more", nn.Linear(3, 3).to(NAME))
    assert kind_of_job(made) == NAME, "beside the CPU"
