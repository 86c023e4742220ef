"""The operands of oneDNN's recurrent layers."""

from collections.abc import Mapping

from port_planner.ir.graph import Value
from port_planner.ir.operands.call import Fits, GraphCall, Shape
from port_planner.operators.row import ArgumentCheck

_LSTM_MODE, _LSTM_GATES, _MAX_LAYERS = 2, 4, 1 << 16
"""The one kind of recurrent layer for which torch uses oneDNN, and the gates of a cell (`ideep::rnn_kind` LSTM)."""
_LSTM_NUMBERS = ("float32", "bfloat16")
"""Types that all of a layer's tensors may have."""
_LSTM_FLAGS = ("reverse", "has_biases", "bidirectional", "batch_first", "train")


def _lstm(call: GraphCall) -> bool:
    """Return whether the operands of oneDNN's LSTM layer fit: it reads everything except the gradients as
    dense rows of the given sizes.
    """
    backward = "workspace" in call.arguments
    first, *weights = ("weight1 weight2 weight3 weight4" if backward else "weight0 weight1 weight2 weight3").split()
    states = "hx_ cx_tmp" if backward else "hx_ cx_"
    (length, rows, width), hidden = call.shape("input"), call.size("hidden_size")
    gates = _LSTM_GATES * hidden
    has_biases = call.arguments.get("has_biases") is True
    biases = ((gates,), (gates,)) if has_biases else ((gates, width), (gates, hidden))
    sizes = {"input": (length, rows, width), first: (gates, width), weights[0]: (gates, hidden)}
    sizes |= dict(zip(weights[1:], biases, strict=True)) | dict.fromkeys(states.split(), (rows, hidden))
    if backward:
        sizes |= {"output": (length, rows, hidden), "hy_": (rows, hidden), "cy_": (rows, hidden)}
    kind = _kind_of(call, "input")
    return (
        kind in _LSTM_NUMBERS
        and min(length, rows, width, hidden) > 0
        and call.size("mode") == _LSTM_MODE
        and call.arguments.get("batch_sizes") == ()
        and all(isinstance(call.arguments.get(n), bool) for n in _LSTM_FLAGS)
        and 0 < call.size("num_layers") <= _MAX_LAYERS
        and all(
            call.shape(n) == size and _dense_rows(call.value(n)) and _kind_of(call, n) == kind
            for n, size in sizes.items()
        )
        and (not backward or _lstm_of_forward(call, sizes))
    )


def _lstm_of_forward(call: GraphCall, sizes: Mapping[str, Shape]) -> bool:
    """Return whether a backward pass reads the workspace of a forward pass that was called with the same sizes."""
    made = call.made_by("workspace", "mkldnn_rnn_layer", 3)
    alike = (*_LSTM_FLAGS, "mode", "hidden_size", "num_layers", "batch_sizes")
    return (
        call.arguments.get("train") is True
        and all(call.arguments.get(n) == made.arguments.get(n) for n in alike)
        and _lstm(made)
        and made.shape("input") == sizes["input"]
        and call.shape("grad_output") == sizes["output"]
        and call.all_of("grad_hy grad_cy", sizes["hy_"])
        and {_kind_of(call, n) for n in ("grad_output", "grad_hy", "grad_cy")} <= {_kind_of(made, "input"), None}
        and _kind_of(call, "input") == _kind_of(made, "input")
    )


def _kind_of(call: GraphCall, name: str) -> str | None:
    value = call.value(name)
    return None if value is None else value.dtype


def _dense_rows(value: Value | None) -> bool:
    """Return whether a tensor's numbers are contiguous, in the order of its dimensions."""
    size = 1
    for n, stride in zip(*((value.shape[::-1], value.stride[::-1]) if value is not None else ((), ())), strict=True):
        if n != 1 and stride != size:
            return False
        size *= n
    return value is not None


RULES: dict[ArgumentCheck, Fits] = {ArgumentCheck.LSTM: _lstm}
