"""Operators on tensors without contents tell shapes and compute nothing."""

import torch
from torch import nn

from port_planner.torch_compat.contentless import has_contents, without_contents


def test_a_step_without_contents_leaves_what_has_some_as_it_is() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(4, 3)
    weight = layer.weight.detach().clone()
    with without_contents():
        out = layer(x).relu()
        out.sum().backward()
    assert out.shape == (4, 2) and not has_contents(out)
    assert layer.weight.grad is not None and not has_contents(layer.weight.grad)
    assert has_contents(x) and torch.equal(layer.weight, weight)
