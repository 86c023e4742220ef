"""The probe trains only what it is told to, scores it, and leaves module and generator untouched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from port_planner.job import TrainingJob
from port_planner.job_device import move
from port_planner.sparse.choose import analyse, choose_trainable, layers_of
from port_planner.sparse.probe import TrainingProbe, job_probe
from tests.simulated_device import NAME, SimBackend

Batch = tuple[torch.Tensor, torch.Tensor]


def problem() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    inputs = torch.randn(160, 4)
    targets = inputs.sum(1, keepdim=True)
    return module, list(zip(inputs.split(8), targets.split(8), strict=True))


def squared(module: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(module(batch[0]), batch[1])


def make_probe(module: nn.Module, batches: list[Batch], repeats: int) -> TrainingProbe:
    def optimizer(names: frozenset[str]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for name, p in module.named_parameters() if name in names], 0.05)

    return TrainingProbe(module, squared, batches[:15] * repeats, batches[15:], optimizer)


def test_training_scores_better_and_leaves_no_trace() -> None:
    module, batches = problem()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    generator = torch.get_rng_state()
    probe = make_probe(module, batches, 10)
    everything = frozenset(name for name, _ in module.named_parameters())
    nothing, head, full = probe(frozenset()), probe(frozenset({"2.weight", "2.bias"})), probe(everything)
    assert nothing < head < full
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
    assert module.training and torch.equal(torch.get_rng_state(), generator)


def small_job() -> TrainingJob:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    x = torch.randn(40, 4)
    return TrainingJob(
        model,
        lambda m, a, b: nn.functional.mse_loss(m(a), b),
        torch.optim.SGD(model.parameters(), 0.05),
        [x, x.sum(1, keepdim=True)],
        8,
    )


@pytest.mark.own_process
def test_a_job_on_a_device_is_probed_there() -> None:
    SimBackend()
    here, there = small_job(), small_job()
    move(there, NAME)
    for names in (frozenset[str](), frozenset({"2.weight"}), frozenset({"0.weight", "2.bias"})):
        before = torch.get_rng_state()
        assert job_probe(there, 3)(names) == job_probe(here, 3)(names)
        assert torch.equal(torch.get_rng_state(), before)
    assert {p.device.type for p in there.model.parameters()} == {NAME}


def test_the_probe_feeds_the_choice() -> None:
    module, batches = problem()
    probe = make_probe(module, batches, 3)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    table = analyse(layers_of(list(sizes)), probe)
    found = choose_trainable(table, lambda names: sum(sizes[name] for name in names), 20, probe)
    assert found is not None and found.proven
    assert found.needed_bytes <= 20
    assert found.measured >= table.baseline


def noisy_job(evaluated: bool) -> TrainingJob:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
    groups = [{"params": module[0].parameters(), "lr": 0.01}, {"params": module[3].parameters(), "lr": 0.03}]
    inputs = torch.randn(50, 4)
    data = [inputs, inputs.sum(1, keepdim=True)]

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = model(x)
        return nn.functional.mse_loss(out, y), ((out - y).abs() < 0.5).float().mean()

    return TrainingJob(module, loss, torch.optim.Adam(groups), data, 8, eval_data=data if evaluated else ())


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_job_is_probed_by_its_own_optimizer_on_what_it_is_not_trained_on(evaluated: bool) -> None:
    job = noisy_job(evaluated)
    probe = job_probe(job, 30)
    trained = {row for _, rows in probe.train_batches for row in rows.tolist()}
    judged = {row for _, rows in probe.eval_batches for row in rows.tolist()}
    assert judged == set(range(50)) if evaluated else len(judged) == 10 and not trained & judged
    assert trained == set(range(50)) - (set() if evaluated else judged)
    optimizer = probe.optimizer(frozenset({"3.weight"}))
    assert isinstance(optimizer, torch.optim.Adam) and [g["lr"] for g in optimizer.param_groups] == [0.01, 0.03]
    assert [len(g["params"]) for g in optimizer.param_groups] == [0, 1]
    head = frozenset({"3.weight", "3.bias"})
    assert probe(head) > probe(frozenset())
    result = probe.results[head]
    assert result.metric is not None and 0 <= result.metric <= 1 and -result.loss == probe(head)
    again = job_probe(job, 30)
    assert again(head) == probe(head)  # dropout draws the same numbers for every set
