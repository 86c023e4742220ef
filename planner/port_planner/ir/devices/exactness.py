"""Operators that do not give the same bits each time, by kind of device, with who says so.

On the CPU all that a step may consist of repeat on a fixed number of threads; what is random repeats with its generator. Convolutions
and matrix products of a GPU repeat on one card with one library and the settings of `torch_device.repeat_kernels`.
"""

from collections.abc import Mapping

from port_planner.ir.devices.kinds import CPU, CUDA, MPS
from port_planner.ir.graph import Op, Ref, StepGraph

_NOTES = "torch 2.13, use_deterministic_algorithms"
_ATTENTION = "pytorch#182551"
_APPLE, _APPLE_PATHS = "pytorch#195754", "pytorch#197506"

_ACCUMULATE = 3
"""Position among the arguments of `index_put`."""

REORDERED: Mapping[str, Mapping[str, str]] = {
    CUDA: {
        **dict.fromkeys(
            (
                "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "index_add", "index_add_", "index_copy",
                "index_copy_", "index_put", "index_put_", "index_select_backward", "_adaptive_avg_pool2d_backward",
                "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward", "avg_pool3d_backward",
                "max_pool3d_with_indices_backward", "upsample_linear1d_backward", "upsample_bilinear2d_backward",
                "upsample_bicubic2d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward",
                "replication_pad1d_backward", "replication_pad2d_backward", "nll_loss2d_forward", "_ctc_loss_backward", "histc",
                "median", "cumsum", "grid_sampler_2d_backward",
            ),
            _NOTES,
        ),
        **dict.fromkeys(
            (
                "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention_backward",
                "_scaled_dot_product_cudnn_attention_backward",
            ),
            _ATTENTION,
        ),
    },
    MPS: {
        "embedding_dense_backward": "pytorch#195404",
        **dict.fromkeys(("scatter", "scatter_", "index_put", "index_put_"), "pytorch#97574"),
        **dict.fromkeys(("scatter_add", "scatter_add_", "index_add", "index_add_", "index_select_backward"), _APPLE),
        **dict.fromkeys(
            (
                "scatter_reduce", "grid_sampler_2d_backward", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
                "adaptive_max_pool2d_backward", "avg_pool2d_backward", "avg_pool3d_backward", "upsample_nearest1d_backward",
                "upsample_nearest2d_backward", "upsample_linear1d_backward", "upsample_bilinear2d_backward",
                "upsample_bicubic2d_backward",
            ),
            _APPLE_PATHS,
        ),
    },
}  # fmt: skip
"""Base name of an operator -> source."""

_FLOATING = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def reordered_operators(graph: StepGraph) -> dict[str, str]:
    """Return the operators of a step that add or write in another order each time on its device, with the source of that."""
    table = REORDERED.get(graph.device, {})
    found: dict[str, str] = {}
    for i, op in enumerate(graph.ops):
        if all(graph.storages[s].device == CPU for s in (*graph.reads[i], *graph.creates[i])):
            continue
        base = op.name.removeprefix("aten::").partition(".")[0]
        if base in table and not _repeats(graph, op, base):
            found[base] = table[base]
    return found


def _repeats(graph: StepGraph, op: Op, base: str) -> bool:
    """Say whether this call repeats although others of its name do not."""
    if base.startswith("index_put"):
        return graph.device == CUDA and (_accumulates(op) or _chosen_by_mask(graph, op))
    if base in ("scatter", "scatter_"):
        return ".value" in op.name  # whichever of several writers comes last, it writes the same
    if base == "median":
        return ".dim" not in op.name
    if base == "cumsum":
        return isinstance(op.args[0], Ref) and graph.values[op.args[0].value].dtype not in _FLOATING
    return False


def _accumulates(op: Op) -> bool:
    """Say whether contributions are added, which CUDA sorts first."""
    return len(op.args) > _ACCUMULATE and op.args[_ACCUMULATE] is True


def _chosen_by_mask(graph: StepGraph, op: Op) -> bool:
    """Say whether each place is written once: a mask names none twice."""
    indices = [a for a in op.args[1] if isinstance(a, Ref)] if isinstance(op.args[1], tuple) else []
    return bool(indices) and all(graph.values[a.value].dtype == "bool" for a in indices)
