"""Operators that do not give the same bits each time, by kind of device, with a source.

On the CPU, all allowed operators are repeatable with a fixed number of threads, and random ones with their generator's
state. Convolutions and matrix products of a GPU repeat on one card with one library and the settings of
`torch_device.repeat_kernels`.
"""

from collections.abc import Mapping

from port_planner.ir.device_kinds import CPU, CUDA, MPS
from port_planner.ir.graph import Op, Ref, StepGraph
from port_planner.operators import base_name
from port_planner.operators.table import OPERATORS

_ACCUMULATE = 3
"""Position among the arguments of `index_put`."""

REORDERED: Mapping[str, Mapping[str, str]] = {
    CUDA: {name: row.reordered_on_cuda for name, row in OPERATORS.items() if row.reordered_on_cuda},
    MPS: {name: row.reordered_on_mps for name, row in OPERATORS.items() if row.reordered_on_mps},
}
"""Base name of an operator -> source."""

_FLOATING = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def reordered_operators(graph: StepGraph) -> dict[str, str]:
    """Return the operators of a step that add or write in a different order each time on its device, with a source."""
    table = REORDERED.get(graph.device, {})
    found: dict[str, str] = {}
    for i, op in enumerate(graph.ops):
        if all(graph.storages[s].device == CPU for s in (*graph.reads[i], *graph.creates[i])):
            continue
        base = base_name(op.name)
        if base in table and not _repeats(graph, op, base):
            found[base] = table[base]
    return found


def _repeats(graph: StepGraph, op: Op, base: str) -> bool:
    """Return whether this call is repeatable although others of its name are not."""
    if base.startswith("index_put"):
        return graph.device == CUDA and (_accumulates(op) or _chosen_by_mask(graph, op))
    if base.removesuffix("_") == "scatter":
        return ".value" in op.name  # whichever writer comes last writes the same value
    if base == "median":
        return ".dim" not in op.name
    if base == "cumsum":
        return isinstance(op.args[0], Ref) and graph.values[op.args[0].value].dtype not in _FLOATING
    return False


def _accumulates(op: Op) -> bool:
    """Return whether contributions are added, which CUDA sorts first."""
    return len(op.args) > _ACCUMULATE and op.args[_ACCUMULATE] is True


def _chosen_by_mask(graph: StepGraph, op: Op) -> bool:
    """Return whether each place is written once, because a mask names none twice."""
    indices = [a for a in op.args[1] if isinstance(a, Ref)] if isinstance(op.args[1], tuple) else []
    return bool(indices) and all(graph.values[a.value].dtype == "bool" for a in indices)
