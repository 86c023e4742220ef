"""Recorded steps fit; the same steps with other shapes or another order are refused."""

from dataclasses import replace

import pytest
import torch

from benchmarks.models import WORKLOADS, workload
from port_planner.capture.step import capture_evaluation, capture_step
from port_planner.ir.graph import GraphError, Ref, StepGraph
from port_planner.ir.operands.verify import verify_operands
from tests.planner.ir.operands.recorded_step import INDICES, changed, place


@pytest.mark.long
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_model_fits(name: str) -> None:
    w = workload(name, small=True)
    graphs = capture_step(w.model, w.loss_fn, torch.optim.SGD(w.model.parameters(), lr=0.1), w.batch(0)).graphs
    verify_operands(graphs["step"])
    verify_operands(capture_evaluation(w.model, w.loss_fn, w.batch(0)).graphs["eval"])


TRUSTED = (
    *INDICES, "native_batch_norm_backward", "native_layer_norm_backward", "_log_softmax_backward_data", "gelu_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_adaptive_avg_pool2d_backward", "avg_pool2d_backward",
    "reflection_pad2d_backward", "replication_pad2d_backward", "grid_sampler_2d_backward", "unfold_backward",
    "reflection_pad3d_backward", "replication_pad3d_backward", "grid_sampler_3d_backward", "_cdist_backward", "_pdist_backward",
)  # fmt: skip
"""Operators whose first argument has to have the shape that the others say."""


def test_what_was_recorded_fits(graph: StepGraph) -> None:
    verify_operands(graph)
    names = {op.name.partition("::")[2].partition(".")[0] for op in graph.ops}
    assert set(TRUSTED) | {"native_batch_norm"} <= names


@pytest.mark.parametrize("name", TRUSTED)
def test_a_gradient_of_another_shape(graph: StepGraph, name: str) -> None:
    v = graph.ops[place(graph, name)].args[0]
    assert isinstance(v, Ref)
    value = graph.values[v.value]
    other = replace(value, shape=(*value.shape, 1), stride=(*value.stride, 1))
    wide = replace(graph, values=(*graph.values, other))
    with pytest.raises(GraphError, match=name):
        verify_operands(changed(wide, name, lambda op: replace(op, args=(Ref(len(graph.values)), *op.args[1:]))))


@pytest.mark.parametrize("name", ["nll_loss_backward", "embedding_dense_backward", "_ctc_loss_backward"])
def test_a_backward_pass_before_the_forward_pass_that_checks(graph: StepGraph, name: str) -> None:
    i = place(graph, name)
    order = (i, *range(i), *range(i + 1, len(graph.ops)))
    with pytest.raises(GraphError, match=name):
        verify_operands(graph.reordered(order))
