"""The sparse updates of the tables, chosen by hand in the manner of the paper (arXiv 2206.15472)."""

from __future__ import annotations

from port_planner.mcu import LayerUpdate, SparseScheme
from port_planner.mcu.ir import Graph, OpKind


def last_five(graph: Graph) -> SparseScheme:
    """Return biases of the last five layers, the weights of the last two pointwise layers and the head."""
    layers = graph.weighted()
    updates = {op.name: LayerUpdate(True) for op in layers[-5:]}
    pointwise = [op for op in layers if op.kind is OpKind.CONV and op.kernel == (1, 1)]
    for op in (*pointwise[-2:], layers[-1]):
        updates[op.name] = LayerUpdate(True, op.out_shape.channels)
    return SparseScheme({op.name: updates[op.name] for op in layers if op.name in updates})


def late_blocks(graph: Graph) -> SparseScheme:
    """Return a scheme in the manner of the paper's for MobileNetV2: late biases, and the
    expansions of four late blocks.
    """
    layers = graph.weighted()
    updates = {op.name: LayerUpdate(True) for op in layers[-16:]}
    expansions = [
        op for op in layers[-16:-2] if op.kind is OpKind.CONV and op.in_shape.channels < op.out_shape.channels
    ]
    for op in expansions[-4:]:
        updates[op.name] = LayerUpdate(True, op.out_shape.channels // 2)
    updates[layers[-1].name] = LayerUpdate(True, layers[-1].out_shape.channels)
    return SparseScheme({op.name: updates[op.name] for op in layers if op.name in updates})
