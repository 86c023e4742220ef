"""Which dimension an operator carries through: the outermost in memory, and only where the rule says so."""

import pytest
import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.ir.graph import Op, Ref, StepGraph
from port_planner.operators import base_name, operator_of
from port_planner.operators.row import TileRule
from port_planner.tiling.algebra import leading, multiple_of, tile_dimensions
from tests.planner.steps import tiny_step
from tests.planner.tiling.language_step import language_step


def graph_of(function: torch.nn.Module, *inputs: torch.Tensor) -> StepGraph:
    optimizer = torch.optim.SGD(function.parameters(), lr=0.1)
    return capture_step(function, lambda m, *x: m(*x).sum(), optimizer, inputs).graphs["step"]


def rule_of(op: Op) -> TileRule:
    rule = operator_of(op.name).cut
    assert rule is not None
    return rule


def cut(graph: StepGraph, name: str) -> list[dict[int, int] | None]:
    return [tile_dimensions(graph, op) for op in graph.ops if base_name(op.name) == name]


def test_the_outermost_dimension_leads_and_views_of_parts_do_not_unless_they_reach_over_all() -> None:
    graph = language_step().graphs["step"]
    names = [base_name(op.name) for op in graph.ops]
    query = graph.ops[names.index("clone")]
    (view,) = (a.value for a in query.args if isinstance(a, Ref))
    assert graph.values[view].offset == 0 and leading(graph, view) == 0  # a third of each row, of every row
    for v, value in enumerate(graph.values):
        d = leading(graph, v)
        if d is not None:
            assert value.shape[d] > 1
            assert value.stride[d] == max(k for n, k in zip(value.shape, value.stride, strict=True) if n > 1)


@pytest.mark.parametrize(
    "name", ["addmm", "gelu", "native_layer_norm", "_softmax", "bmm", "_log_softmax", "nll_loss_backward", "mul"]
)
def test_operators_of_rows_are_cut(name: str) -> None:
    found = cut(language_step().graphs["step"], name)
    assert found and found[0] is not None


def test_sums_over_rows_are_never_cut() -> None:
    graph = language_step().graphs["step"]
    weights = {s for s, storage in enumerate(graph.storages) if storage.persistent}
    for i, op in enumerate(graph.ops):
        dims = tile_dimensions(graph, op)
        if base_name(op.name) in ("mm", "addmm") and dims is not None:
            (out,) = (graph.values[v] for v in op.outputs if v is not None)
            assert out.shape[0] == 256  # rows of the batch: a gradient of a weight, [columns, inner], sums over them
            assert not weights & {graph.values[v].storage for v in dims}, i
    assert all(d is None for d in cut(graph, "native_layer_norm_backward") + cut(graph, "sum"))


class _Root(nn.Module):
    """A norm by the root of the mean square, as language models write it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(32, 32, dtype=dtype), nn.Parameter(torch.ones(32, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def test_a_norm_by_the_root_of_the_mean_square_is_cut_by_rows() -> None:
    graph = graph_of(_Root(torch.bfloat16), torch.randn(4, 24, 32, dtype=torch.bfloat16))
    for name in ("pow", "mean", "rsqrt", "_to_copy"):
        assert all(dims is not None and set(dims.values()) <= {0} for dims in cut(graph, name)), name
    roots = [op for op in graph.ops if base_name(op.name) in ("pow", "rsqrt")]
    assert {multiple_of(graph, op, rule_of(op)) for op in roots[:2]} == {1}  # in float32
    gone = graph_of(_Mean(), torch.randn(4, 24, 32))
    assert cut(gone, "mean") == [None]  # what has a dimension less is not cut


class _Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mean(-1)


def test_statistics_of_a_batch_forbid_cutting_it() -> None:
    graph = tiny_step().graphs["step"]
    assert cut(graph, "native_batch_norm")[0] is None
    assert cut(graph, "convolution")[0] is not None
    assert all(d is None for d in cut(graph, "convolution_backward"))


def test_random_operators_are_not_cut() -> None:
    graph = language_step().graphs["step"]
    assert all(tile_dimensions(graph, op) is None for op in graph.ops if op.random)
