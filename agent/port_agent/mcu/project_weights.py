"""The weights of a project's model, written next to its tables by the names of the module's layers,
and read from such a file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.layers import LAYERS, MODULE, Arrays, LayerTable, OpLayer, under_all_names, unfolded
from port_agent.system.atomic_file import write_atomically

if TYPE_CHECKING:
    from port_planner.mcu.compile import CompiledModel
    from port_planner.mcu.ir import Graph
    from port_planner.mcu.quantize import QuantizedOp


MAX_EXPORTED = 127.75
"""The largest code with a low byte that a board exports, 127 and 127/256, plus its rounding in a file of floats."""


UNUSED = "num_batches_tracked"
"""Name of a counter that a batch norm keeps during training in PyTorch, which is not used."""


def write_layers(folder: Path, model: "CompiledModel") -> None:
    """Write the layers of a compiled model into its directory."""
    arrays: Arrays = {MODULE + name: values for name, values in model.quantized.graph.state.items()}
    layers = []
    for op in model.quantized.ops:
        if op.weight is None or op.bias is None or op.weight_scale is None or op.op.origin is None:
            continue
        name = op.op.name
        arrays |= {f"{name}/weight": op.weight, f"{name}/bias": op.bias, f"{name}/scale": op.weight_scale}
        layers.append(layer_of(model, op))
    table = LayerTable(tuple(layers), model.quantized.graph.same)
    about = {"format": "port-mcu-layers", "layers": msgspec.json.encode(table).decode()}
    write_atomically(folder / LAYERS, save({name: np.array(values) for name, values in arrays.items()}, metadata=about))


def layer_of(model: "CompiledModel", op: "QuantizedOp") -> OpLayer:
    from port_planner.mcu.ir import LayerOrigin, OpKind, row_bytes

    source, slot = op.op, model.memory.parameters.slots[op.op.name]
    origin = source.origin or LayerOrigin("")
    return OpLayer(
        source.name,
        origin.layer,
        origin.norm,
        origin.norm_eps,
        origin.extents,
        origin.order,
        () if op.weight is None else op.weight.shape,
        source.kind is OpKind.DEPTHWISE,
        float(op.read_scale),
        model.scheme.of(source.name).rows * row_bytes(source),
        slot.weight_offset,
        slot.bias_offset,
        slot.q88_offset,
        origin.part,
    )


def read_weights(path: Path) -> Arrays:
    """Return the arrays of a file that `mcu export` wrote, or of any safetensors file of a state_dict.

    Floats of less than 32 bits, such as bfloat16, become float32. Raises BoardJobError where it cannot be read.
    """
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BoardJobError(f"cannot read {path} ({error}); give a .safetensors file of mcu export") from error
    return {
        name: (tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor).numpy()
        for name, tensor in tensors.items()
    }


def take_weights(model: "CompiledModel", given: Mapping[str, NDArray[Any]]) -> "CompiledModel":
    """Return the model with other weights, from a state_dict or codes, in its calibrated scales.

    Weights exported from a board of the same project are restored to the bit. Raises BoardJobError for missing or
    unknown names, and for arrays of a different shape. Also raises it for values that are not finite or do not fit, and
    for two values of one tensor. A differing value that is in no layer of the board is an error, too.
    """
    from port_planner.mcu.compile import with_memory

    layers = {op.op.name: layer_of(model, op) for op in model.quantized.ops if op.op.origin}
    _refuse_arrays(model.quantized.graph.state, given)
    if not _are_codes(layers.values(), given):
        given = _completed(model.quantized.graph.same, given)
    _refuse_names(model.quantized.graph.state, layers.values(), given)
    _refuse_others(model, given)
    ops = tuple(
        _with_weights(op, layers[op.op.name], given) if op.op.name in layers else op for op in model.quantized.ops
    )
    state = _state_of(model.quantized.graph, layers.values(), given)
    graph = replace(model.quantized.graph, ops=tuple(op.op for op in ops), state=state)
    return with_memory(
        replace(model, quantized=replace(model.quantized, graph=graph, ops=ops)), model.scheme, model.memory
    )


def _are_codes(layers: Iterable[OpLayer], given: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether a file contains codes with their scales rather than a state_dict."""
    return any(f"{layer.weight}_scale" in given for layer in layers)


def _completed(same: Iterable[tuple[str, ...]], given: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return a state_dict with every tensor under all of its names.

    Raises BoardJobError if a tensor has two values.
    """
    for names in same:
        known = [name for name in names if name in given]
        for other in known[1:]:
            if not np.array_equal(given[known[0]], given[other]):
                raise BoardJobError(
                    f"{known[0]} and {other} are one tensor in the project's module, but differ in the weights; give "
                    "it one value"
                )
    return under_all_names(dict(given), same)


def _state_of(graph: "Graph", layers: Iterable[OpLayer], given: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return the module's state_dict with the given weights, which `mcu export` writes for
    layers that are not trained.
    """
    if not _are_codes(layers, given):
        return {name: given.get(name, values).astype(values.dtype) for name, values in graph.state.items()}
    found = dict(graph.state)
    for layer in layers:
        weight, bias = _folded(layer, given)
        codes = unfolded(layer, found, weight.reshape(layer.shape).astype(np.float32), bias)
        found |= under_all_names(codes, graph.same)
    return found


def _refuse_names(
    state: Mapping[str, NDArray[Any]], layers: Iterable[OpLayer], given: Mapping[str, NDArray[Any]]
) -> None:
    """Raise BoardJobError unless a file has exactly the names of the module, or those of the codes of all layers."""
    coded = {f"{name}_scale" for layer in layers for name in (layer.weight, layer.bias)}
    needed = set(state)
    known = needed
    if coded & given.keys():
        needed = coded | {name.removesuffix("_scale") for name in coded}
        known = needed | {f"{name.removesuffix('_scale')}_low" for name in coded}
    missing = sorted(name for name in needed - given.keys() if not name.endswith(UNUSED))
    if missing:
        raise BoardJobError(f"the weights lack {', '.join(missing[:4])}; give all of this project's module")
    if unknown := sorted(given.keys() - known):
        raise BoardJobError(
            f"the weights have {', '.join(unknown[:4])}, which the project's module does not; give those of this module"
        )


def _refuse_arrays(state: Mapping[str, NDArray[Any]], given: Mapping[str, NDArray[Any]]) -> None:
    """Raise BoardJobError for an array whose shape differs from the module's, or with values that are not finite."""
    for name, values in sorted(given.items()):
        if name in state and values.shape != state[name].shape:
            raise BoardJobError(
                f"{name} has shape {list(values.shape)}, but in the project's module {list(state[name].shape)}; give "
                "the weights as PyTorch has them"
            )
        wrong = values.size if values.dtype.kind not in "fiub" else int(values.size - np.isfinite(values).sum())
        if wrong:
            raise BoardJobError(
                f"{name} has {wrong:,} values that are NaN, infinite or complex; give finite real numbers"
            )


def _refuse_others(model: "CompiledModel", given: Mapping[str, NDArray[Any]]) -> None:
    """Raise BoardJobError if values that are part of the tables differ, such as the slope of a PReLU."""
    graph, origins = model.quantized.graph, [op.op.origin for op in model.quantized.ops if op.op.origin]
    state, places = graph.state, {place for origin in origins for place in (origin.layer, origin.norm)}
    taken = under_all_names({name: state[name] for name in state if name.rpartition(".")[0] in places}, graph.same)
    for name in sorted((state.keys() & given.keys()) - taken.keys()):
        if not np.array_equal(state[name], given[name]):
            raise BoardJobError(
                f"{name} differs from that of the project's module, and only weights of layers can be replaced; load "
                "the file in project.py"
            )


def _with_weights(op: "QuantizedOp", layer: OpLayer, given: Mapping[str, NDArray[Any]]) -> "QuantizedOp":
    from port_planner.mcu.quantize import BIAS_LIMIT

    scale = np.asarray(op.weight_scale)
    try:
        weight, bias = _folded(layer, given)
        exact = (weight / layer.along_channels(scale.astype(np.float64))).reshape(layer.shape)
        parts = np.round(exact * 256)  # a low byte at its limit belongs to the same code after float32, too
        codes = np.clip(np.floor((parts + 128) / 256), -127, 127)
        low = np.clip(parts - codes * 256 + 128, 0, 255).astype(np.uint8)
        whole = np.broadcast_to(np.round(bias / (layer.in_scale * scale.astype(np.float64))), scale.shape)
    except (KeyError, ValueError) as error:
        place = layer.layer or layer.norm
        raise BoardJobError(
            f"the weights do not fit layer {place} ({error}); give those of this project's module"
        ) from error
    if float(np.abs(whole).max(initial=0.0)) > BIAS_LIMIT:
        raise BoardJobError(
            f"biases of layer {layer.layer or layer.norm} are larger than the project's model can hold; load the file "
            "in project.py, so that the ranges follow"
        )
    most = float(np.abs(exact).max(initial=0.0))
    if most > MAX_EXPORTED:
        raise BoardJobError(
            f"weights of layer {layer.layer or layer.norm} are up to {most / 127:.3g} times the largest that the "
            "project's model can hold; load the file in project.py, so that the ranges follow, or give a larger "
            "--growth; if project.py makes random weights, seed them: torch.manual_seed(0)"
        )
    source = replace(
        op.op,
        weight=np.ascontiguousarray(weight.reshape(layer.shape), np.float32),
        bias=np.broadcast_to(bias, scale.shape).astype(np.float32),
    )
    whole_bias = np.clip(whole, -BIAS_LIMIT, BIAS_LIMIT).astype(np.int32)
    return replace(op, op=source, weight=codes.astype(np.int8), low=low, bias=whole_bias)


def _folded(layer: OpLayer, given: Mapping[str, NDArray[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weight and bias of an op as real numbers, from codes or a state_dict. Raises KeyError, ValueError."""
    if f"{layer.weight}_scale" in given:
        codes = given[layer.weight].astype(np.float64)
        if f"{layer.weight}_low" in given:
            codes = codes + (given[f"{layer.weight}_low"].astype(np.float64) - 128) / 256
        weight = layer.to_op(codes) if layer.layer else codes.reshape(layer.shape)
        scale = layer.along_channels(given[f"{layer.weight}_scale"].astype(np.float64))
        return weight * scale, given[layer.bias].astype(np.float64) * given[f"{layer.bias}_scale"]
    bias = (given.get(layer.bias, np.zeros(1)) if layer.layer else np.zeros(1)).astype(np.float64)
    gain = np.ones(1)
    if layer.norm:
        gain = 1 / np.sqrt(given[f"{layer.norm}.running_var"].astype(np.float64) + layer.norm_eps)
        gain = gain * given.get(f"{layer.norm}.weight", np.ones(1)).astype(np.float64)
        mean = given[f"{layer.norm}.running_mean"].astype(np.float64)
        bias = (bias - mean) * gain + given.get(f"{layer.norm}.bias", np.zeros(1)).astype(np.float64)
    if not layer.layer:
        return gain.reshape(layer.shape), bias
    return layer.to_op(given[layer.weight].astype(np.float64)) * layer.along_channels(gain), bias
