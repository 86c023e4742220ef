"""The operands of softmax, normalizations and attention."""

import math
from dataclasses import replace

from port_planner.ir.operands.call import Fits, GraphCall
from port_planner.operators.row import ArgumentCheck


def _same_shapes(call: GraphCall) -> bool:
    return call.shape("grad_output") == call.shape("output")


def _gelu(call: GraphCall) -> bool:
    """Check a gelu. oneDNN's kernel reads as many gradients as there are inputs."""
    return call.shape("grad_output") == call.shape("self")


def _batch_norm(call: GraphCall) -> bool:
    shape = call.shape("input")
    if len(shape) < 2 or 0 in shape:
        return False
    training = call.arguments.get("training", call.arguments.get("train"))
    running, saved = "running_mean running_var", "save_mean save_invstd"
    needed = running if not training else saved if "train" in call.arguments else ""
    there = all(call.shape(name) == shape[1:2] for name in needed.split())
    one_each = f"weight bias {running} {saved if training else ''}"
    return there and call.all_of(one_each, shape[1:2]) and call.all_of("grad_out", shape)


def _cudnn_batch_norm_backward(call: GraphCall) -> bool:
    shape = call.shape("input")
    if len(shape) < 2 or 0 in shape:
        return False
    saved = all(call.shape(name) == shape[1:2] for name in ("save_mean", "save_var"))
    return saved and call.all_of("weight running_mean running_var", shape[1:2]) and call.shape("grad_output") == shape


def _layer_norm_backward(call: GraphCall) -> bool:
    shape, inner = call.shape("input"), call.sizes("normalized_shape")
    rows = math.prod(shape[: len(shape) - len(inner)])
    return (
        call.shape("grad_out") == shape
        and shape[len(shape) - len(inner) :] == inner
        and bool(inner)
        and math.prod(call.shape("mean")) == math.prod(call.shape("rstd")) == rows
        and call.all_of("weight bias", inner)
    )


def _weight_norm(call: GraphCall) -> bool:
    v, backward = "v" if "v" in call.arguments else "saved_v", "saved_v" in call.arguments
    shape, dim = call.shape(v), call.size("dim") if "dim" in call.arguments else 0
    if len(shape) < 1 or 0 in shape or dim not in (0, len(shape) - 1):
        return False
    norms = tuple(n if i == dim else 1 for i, n in enumerate(shape))
    return call.all_of("g saved_g saved_norms", norms) and (not backward or call.shape("grad_w") == shape)


def _attention(call: GraphCall) -> bool:
    q, k, v = (call.shape(name) for name in ("query", "key", "value"))
    if {len(q), len(k), len(v)} != {4} or 0 in (*q, *k, *v):
        return False
    fits = q[0] == k[0] and k == v and q[3] == k[3] and q[1] % k[1] == 0
    for name in (name for name in ("attn_mask", "attn_bias") if call.arguments.get(name) is not None):
        mask, wanted = call.shape(name), (q[0], q[1], q[2], k[2])
        fits &= len(mask) in (2, 4) and all(n in (1, m) for n, m in zip(mask[::-1], wanted[::-1], strict=False))
    rows = ("query", "key", "value", "out")
    dense = all(value.stride[-1] == 1 for name in rows if (value := call.value(name)) is not None)
    return fits and dense and call.all_of("grad_out grad_out_ out", q) and call.all_of("logsumexp", q[:3])


def _padded_attention(call: GraphCall) -> bool:
    """Check as `_attention` does, for kernels that keep the logarithms in rows of their own
    length, which they check.
    """
    rows = call.shape("logsumexp")[:2] == call.shape("query")[:2]
    return rows and _attention(replace(call, arguments={**call.arguments, "logsumexp": None}))


def _fake_quantize(call: GraphCall) -> bool:
    """Check a fake quantization.

    The kernels read one number from each of these tensors, or one per row from some, and resize empty ones.
    """
    given = {name for name in (*_FOR_EACH_ROW, *_ONE_NUMBER) if call.arguments.get(name) is not None}
    shapes = {name: call.shape(name) for name in given}
    if call.arguments.get("per_row_fake_quant") in (None, False):
        return {math.prod(shape) for shape in shapes.values()} == {1}
    rows, for_each = call.shape("self")[:1], given & {*_FOR_EACH_ROW}
    dense = all((value := call.value(name)) is not None and value.stride == (1,) for name in for_each)
    fits = dense and rows != (0,) and all(shapes[name] == rows for name in for_each)
    return fits and call.arguments.get("ch_axis") == 0 and {math.prod(shapes[n]) for n in given - for_each} == {1}


_FOR_EACH_ROW = ("scale", "zero_point", "running_min", "running_max")
_ONE_NUMBER = ("fake_quant_enabled", "observer_on", "fake_quant_on")

RULES: dict[ArgumentCheck, Fits] = {
    ArgumentCheck.SAME_SHAPES: _same_shapes,
    ArgumentCheck.GELU: _gelu,
    ArgumentCheck.BATCH_NORM: _batch_norm,
    ArgumentCheck.CUDNN_BATCH_NORM_BACKWARD: _cudnn_batch_norm_backward,
    ArgumentCheck.LAYER_NORM_BACKWARD: _layer_norm_backward,
    ArgumentCheck.WEIGHT_NORM: _weight_norm,
    ArgumentCheck.ATTENTION: _attention,
    ArgumentCheck.PADDED_ATTENTION: _padded_attention,
    ArgumentCheck.FAKE_QUANTIZE: _fake_quantize,
}
