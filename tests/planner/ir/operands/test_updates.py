"""Fused updates: a parameter, its gradient and its states lie alike."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.ir.graph import GraphError, Ref, StepGraph
from port_planner.ir.operands.verify import verify_operands
from tests.planner.ir.operands.recorded_step import changed, place

OPTIMIZERS = {
    "_fused_adamw_": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "_fused_adam_": lambda parameters: torch.optim.Adam(parameters, amsgrad=True, fused=True),
    "_fused_adagrad_": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
    "_fused_sgd_": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}


def fused(name: str) -> StepGraph:
    model = nn.Linear(5, 3, bias=False)
    optimizer = OPTIMIZERS[name](model.parameters())
    return capture_step(model, lambda m, x: m(x).sum(), optimizer, (torch.randn(2, 5),)).graphs["step"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_recorded_updates_fit(name: str) -> None:
    verify_operands(fused(name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_or_state_that_lies_otherwise(name: str) -> None:
    graph = fused(name)
    op = graph.ops[place(graph, name)]
    listed = [i for i, a in enumerate(op.args) if isinstance(a, tuple) and a]
    for i in listed:
        listed_here = op.args[i]
        assert isinstance(listed_here, tuple)
        (ref,) = listed_here
        assert isinstance(ref, Ref)
        value = graph.values[ref.value]
        other = replace(value, shape=(*value.shape, 2), stride=(*value.stride, 1))
        wide = replace(graph, values=(*graph.values, other))
        args = tuple((Ref(len(graph.values)),) if k == i else a for k, a in enumerate(op.args))
        with pytest.raises(GraphError, match=name):
            verify_operands(changed(wide, name, partial(replace, args=args)))
