"""The probe trains only what it is told to, scores it, and leaves the module untouched."""

from __future__ import annotations

import torch
from torch import nn

from planner.sparse_probe import TrainingProbe
from planner.sparse_update import analyse, choose_trainable, layers_of


def problem() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    inputs = torch.randn(160, 4)
    targets = inputs.sum(1, keepdim=True)
    return module, list(zip(inputs.split(8), targets.split(8), strict=True))


def squared(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(module(batch[0]), batch[1])


def test_training_scores_better_and_leaves_no_trace():
    module, batches = problem()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    probe = TrainingProbe(module, squared, batches[:15] * 10, batches[15:], 0.05)
    everything = frozenset(name for name, _ in module.named_parameters())
    nothing, head, full = probe(frozenset()), probe(frozenset({"2.weight", "2.bias"})), probe(everything)
    assert nothing < head < full
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert module.training


def test_the_probe_feeds_the_choice():
    module, batches = problem()
    probe = TrainingProbe(module, squared, batches[:15] * 3, batches[15:], 0.05)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    table = analyse(layers_of(list(sizes)), probe)
    found = choose_trainable(table, lambda names: sum(sizes[name] for name in names), 20, probe)
    assert found is not None and found.proven
    assert found.needed_bytes <= 20
    assert found.measured >= table.baseline
