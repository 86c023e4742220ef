"""What a board learned, as weights of the PyTorch module that was compiled, by the names of its
layers. Does not import torch.

`layers.safetensors` in the directory of a compiled model holds the module's state_dict as it was compiled, and the
codes and scales of each op. Its metadata gives the position of an op's trained parameters, and the layers of the
module that the op represents.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.protocol.board_model import ModelDirectory

LAYERS = "layers.safetensors"
MODULE = "module/"
Arrays = dict[str, NDArray[Any]]


class OpLayer(msgspec.Struct, frozen=True):
    """One op with weights: its layers in the module, the layout of its weights, and the position of their trained part.

    `layer`, `norm`: paths in the module; "" if there is none. The op's weight is the layer's, reshaped to `extents`,
    with its axes in `order`, reshaped to `shape`. Offsets count bytes of the parameters; None: frozen. `part` ends the
    names of weight and bias in layers that have several, such as `_hh_l0`.
    """

    name: str
    layer: str
    norm: str
    norm_eps: float
    extents: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    channels_last: bool
    in_scale: float
    trained_bytes: int
    weight_offset: int | None
    bias_offset: int | None
    low_offset: int | None
    part: str = ""

    @property
    def weight(self) -> str:
        """The name of its weight in the state_dict; for a separate batch norm, that of the norm's weight."""
        return f"{self.layer or self.norm}.weight{self.part}"

    @property
    def bias(self) -> str:
        """The name of its bias in the state_dict; for a separate batch norm, that of the norm's bias."""
        return f"{self.layer or self.norm}.bias{self.part}"

    def along_channels(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return one value per output channel in a shape that broadcasts over the op's weight."""
        return values if self.channels_last else values.reshape(-1, *[1] * (len(self.shape) - 1))

    def to_op(self, weight: NDArray[Any]) -> NDArray[Any]:
        """Return a layer's weight in the op's layout."""
        return weight.reshape(self.extents).transpose(self.order).reshape(self.shape)

    def to_layer(self, weight: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the op's weight in the layer's layout, with that shape."""
        moved = weight.reshape([self.extents[axis] for axis in self.order])
        return np.ascontiguousarray(moved.transpose(np.argsort(self.order)).reshape(shape))


class LayerTable(msgspec.Struct, frozen=True):
    """The ops with weights, and the names of the state_dict that refer to the same tensor."""

    layers: tuple[OpLayer, ...]
    same: tuple[tuple[str, ...], ...] = ()


class LayerTables:
    """The layers of a compiled model, from its directory."""

    def __init__(self, model: ModelDirectory) -> None:
        """Read the layers. Raises BoardJobError if they are missing or unreadable."""
        path = model.path / LAYERS
        try:
            with safe_open(path, "numpy") as file:
                about = file.metadata() or {}
                self.arrays: Arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            self.table = msgspec.json.decode(about.get("layers", ""), type=LayerTable)
        except (OSError, SafetensorError, msgspec.MsgspecError) as error:
            raise BoardJobError(f"cannot read {path} ({error}); compile the model again") from error
        self.model = model

    @property
    def layers(self) -> tuple[OpLayer, ...]:
        """The ops with weights."""
        return self.table.layers

    def codes(self, layer: OpLayer, parameters: bytes) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Return weight and bias of an op in codes, including their trained parts; low bytes are fractions."""
        weight = self.arrays[f"{layer.name}/weight"].astype(np.float32)
        bias = self.arrays[f"{layer.name}/bias"].astype(np.int32)
        if layer.weight_offset is not None:
            trained = weight.reshape(-1)[: layer.trained_bytes]
            trained[:] = np.frombuffer(parameters, np.int8, layer.trained_bytes, layer.weight_offset)
            if layer.low_offset is not None:
                low = np.frombuffer(parameters, np.uint8, layer.trained_bytes, layer.low_offset)
                trained += (low.astype(np.float32) - 128) / 256
        if layer.bias_offset is not None:
            bias = np.frombuffer(parameters, "<i4", len(bias), layer.bias_offset).astype(np.int32)
        return weight, bias

    def values(self, layer: OpLayer, parameters: bytes) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Return weight and bias of an op as real numbers."""
        weight, bias = self.codes(layer, parameters)
        scale = self.arrays[f"{layer.name}/scale"]
        return weight * layer.along_channels(scale), bias * (layer.in_scale * scale.astype(np.float64))

    def state_dict(self, parameters: bytes) -> Arrays:
        """Return the module's state_dict with the board's weights, so that the module computes with them.

        Frozen layers are unchanged.
        """
        state = {name.removeprefix(MODULE): a for name, a in self.arrays.items() if name.startswith(MODULE)}
        for layer in self.layers:
            if layer.weight_offset is not None or layer.bias_offset is not None:
                weight, bias = self.values(layer, parameters)
                found = unfolded(layer, state, None if layer.weight_offset is None else weight, bias)
                state |= under_all_names(found, self.table.same)
        return state

    def code_tensors(self, parameters: bytes) -> Arrays:
        """Return the codes of all layers as the board has them, with batch norms folded in, and their scales.

        `L.weight` and `L.bias` times `L.weight_scale` and `L.bias_scale`, one for each output channel, are the values.
        """
        found: Arrays = {}
        for layer in self.layers:
            shape = self._layer_shape(layer)
            weight, bias = self.codes(layer, parameters)
            scale = self.arrays[f"{layer.name}/scale"]
            whole = np.floor(weight + np.float32(0.5))
            found[layer.weight] = _placed(layer, whole.astype(np.int8), shape)
            found[f"{layer.weight}_scale"] = scale
            found[layer.bias] = bias
            found[f"{layer.bias}_scale"] = layer.in_scale * scale.astype(np.float64)
            if layer.low_offset is not None:
                low = ((weight - whole) * 256 + 128).astype(np.uint8)
                found[f"{layer.weight}_low"] = _placed(layer, low, shape)
        return found

    def _layer_shape(self, layer: OpLayer) -> tuple[int, ...]:
        name = MODULE + layer.weight
        return self.arrays[name].shape if layer.layer and name in self.arrays else ()


def _placed(layer: OpLayer, weight: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return layer.to_layer(weight, shape) if layer.layer else weight.reshape(-1)


def under_all_names(arrays: Arrays, same: Iterable[tuple[str, ...]]) -> Arrays:
    """Return arrays also under the other names of their tensors, because `load_state_dict` uses the last one."""
    others = {name: names for names in same for name in names}
    return {other: values for name, values in arrays.items() for other in others.get(name, (name,))}


def unfolded(
    layer: OpLayer, state: Arrays, weight: NDArray[np.float32] | None, bias: NDArray[np.float64]
) -> dict[str, NDArray[np.float32]]:
    """Return the entries of the module's state_dict with which it computes with an op's weight
    (None: unchanged) and bias.

    A batch norm after a trained weight becomes one that only adds.
    """
    found: dict[str, NDArray[Any]] = {}
    before = state.get(layer.bias, np.zeros(1, np.float32)).astype(np.float64)
    shift, place = bias, layer.bias
    if layer.norm:
        deviation = np.sqrt(state[f"{layer.norm}.running_var"].astype(np.float64) + layer.norm_eps)
        mean = state[f"{layer.norm}.running_mean"].astype(np.float64)
        gain = state.get(f"{layer.norm}.weight")
        if gain is None:
            weight = None if weight is None else weight * layer.along_channels(deviation)
            shift = bias * deviation + mean
        elif not layer.layer:
            found[f"{layer.norm}.weight"] = gain = gain if weight is None else weight.reshape(-1) * deviation
            shift, place = bias + mean * gain / deviation, f"{layer.norm}.bias"
        else:
            if weight is not None:
                found[f"{layer.norm}.weight"] = gain = deviation
            shift, place = bias - (before - mean) * gain / deviation, f"{layer.norm}.bias"
    if place in state:  # a bias that the module does not have is not trained
        found[place] = shift
    if weight is not None and layer.layer:
        found[layer.weight] = layer.to_layer(weight, state[layer.weight].shape)
    return {name: np.ascontiguousarray(values, np.float32) for name, values in found.items()}
