"""The module judges its import: another network is refused by the first node that differs, whoever made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from port_planner.mcu.frontend import SOFTMAX_NOTE, import_module
from port_planner.mcu.ir import Graph, McuCompileError, Shape
from port_planner.mcu.module_trace import evaluating, refuse_difference, run_nodes, trace_module
from port_planner.mcu.torch_axes import TorchAxes

SHAPE = (3, 6, 6)
SAMPLES = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.second(self.first(x).relu()).flatten(1))
        return logits


def changed(graph: Graph, index: int) -> Graph:
    """Return the graph with one weight of one op a little different."""
    weight = np.array(graph.ops[index].weight)
    weight.reshape(-1)[0] += 0.05
    ops = [replace(op, weight=weight) if place == index else op for place, op in enumerate(graph.ops)]
    return replace(graph, ops=tuple(ops))


@pytest.mark.parametrize(("index", "place"), [(0, "relu"), (1, "second"), (2, "head")])
def test_the_first_node_that_differs_is_named(index: int, place: str) -> None:
    module = Body()
    graph = import_module(module, SHAPE)
    with evaluating(module):
        traced = trace_module(module, "body")
        nodes = {node.name: node for node in traced.graph.nodes}
        shapes = [TorchAxes.of(op.out_shape, "CHW") for op in graph.ops]
        flat = TorchAxes.of(graph.ops[1].out_shape, ("CHW",)), TorchAxes.of(Shape(1, 1, 2), "C")
        seen = {"relu": (0, shapes[0]), "second": (1, shapes[1]), "flatten": (1, flat[0]), "head": (2, flat[1])}
        values = {nodes[name]: (graph.ops[at].name, axes) for name, (at, axes) in seen.items()}
        refuse_difference(module, traced, graph, values, SAMPLES)
        with pytest.raises(McuCompileError, match=f"{place}: the compiled network differs from the module here by"):
            refuse_difference(module, traced, changed(graph, index), values, SAMPLES)


def test_parameters_that_share_memory_are_refused_where_they_are_trained() -> None:
    tied = nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 6, bias=False), nn.Linear(6, 2))
    cast(nn.Linear, tied[2]).weight = nn.Parameter(cast(nn.Linear, tied[0]).weight.detach().t())
    with pytest.raises(McuCompileError, match=r"2\.weight: it shares its memory with 0\.weight"):
        import_module(tied, (6,))
    import_module(tied.requires_grad_(False), (6,))
    halves = nn.Parameter(torch.randn(8))  # one tensor's memory, each with a part of its own
    beside = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    cast(nn.Linear, beside[0]).bias, cast(nn.Linear, beside[1]).bias = map(nn.Parameter, halves.detach().chunk(2))
    import_module(beside, (6,))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_parameters_of_another_type_are_refused_by_name(kind: torch.dtype) -> None:
    with pytest.raises(
        McuCompileError, match=rf"first\.weight: it is of type {str(kind)[6:]}; convert .* module\.float"
    ):
        import_module(Body().to(kind), SHAPE)


def test_what_a_trace_does_not_show_is_refused() -> None:
    class Counting(Body):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) if self.calls == 1 else self.head(x[:, :, :4, 0].flatten(1)[:, :1].repeat(1, 16))

    with pytest.raises(McuCompileError, match="output: the compiled network differs from the module here"):
        import_module(Counting(), SHAPE)


def test_a_value_that_is_changed_in_place_is_not_mistaken_for_the_one_before() -> None:
    class InPlace(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            z = self.second(y)
            y.relu_()
            return self.head((z.relu() + self.second(y)).flatten(1))

    with pytest.raises(McuCompileError, match="differs from the module here"):
        import_module(InPlace(), SHAPE)


@pytest.mark.parametrize("end", [nn.Softmax(1), nn.LogSoftmax(-1), lambda x: x.softmax(1), lambda x: x.log_softmax(1)])
def test_a_softmax_at_the_end_is_left_out(end: Callable[..., torch.Tensor]) -> None:
    class Ended(Body):
        def __init__(self) -> None:
            super().__init__()
            self.end = end

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.end(super().forward(x))

    graph = import_module(Ended(), SHAPE)
    assert [op.name for op in graph.ops] == ["first", "second", "head"]
    assert graph.notes == (SOFTMAX_NOTE,) and not import_module(Body(), SHAPE).notes


def test_a_softmax_over_something_else_is_refused() -> None:
    class Ended(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).softmax(0)

    with pytest.raises(McuCompileError, match="output: the compiled network differs"):
        import_module(Ended(), SHAPE)


def test_one_layer_by_itself_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        McuCompileError, match=r"^model: Linear is one layer by itself.*; wrap it: nn\.Sequential\(Linear"
    ):
        import_module(nn.Linear(4, 2), (4,))
    assert len(import_module(nn.Sequential(nn.Linear(4, 2)), (4,)).ops) == 1


def test_what_torch_refuses_is_said_in_one_line() -> None:
    traced = trace_module(Body(), "body")
    with pytest.raises(
        McuCompileError, match=r"^first: torch rejects its inputs \[\[2, 5, 6, 6\]\] \(.*\); check the shape"
    ):
        run_nodes(traced, torch.zeros(2, 5, 6, 6))


def test_every_module_keeps_its_mode() -> None:
    module = Body().train()
    module.second.eval()
    import_module(module, SHAPE)
    assert [inner.training for inner in (module, module.first, module.second)] == [True, True, False]
