"""A step whose gradients are split, and the same with one half that is wrong."""

from dataclasses import replace

import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.ir.graph import Ref, StepGraph
from port_planner.tiling.rewriting import RewrittenGraph

_WEIGHT = 2
"""Which argument of a backward pass is the weight."""


def step() -> StepGraph:
    """Return a step with three equal convolutions whose input wants a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), *(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture_step(model, lambda m, x: m(x).square().mean(), optimizer, (torch.randn(4, 3, 9, 9),)).graphs["step"]


def turned(rewritten: RewrittenGraph, which: int) -> RewrittenGraph:
    """Return the same, of halves that are both the backward pass, with one that reads its weight's rows as columns: the
    right shape, the wrong bits.
    """
    graph = rewritten.graph
    place = rewritten.replacements[which].new[1]
    half = graph.ops[place]
    weight = half.args[_WEIGHT]
    if not isinstance(weight, Ref):
        raise TypeError(f"{half.name} has no weight at argument {_WEIGHT}")
    value = graph.values[weight.value]
    wrong = replace(value, stride=(*value.stride[:2], value.stride[3], value.stride[2]))
    ops = list(graph.ops)
    ops[place] = replace(half, args=(*half.args[:_WEIGHT], Ref(len(graph.values)), *half.args[_WEIGHT + 1 :]))
    return replace(rewritten, graph=replace(graph, ops=tuple(ops), values=(*graph.values, wrong)))
