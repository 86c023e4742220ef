"""A model that computes in 32 bits over frozen weights that stay in 16 bits, with the bits of a model loaded in
float32.

Numbers of bfloat16 and float16 are numbers of float32, so a weight can be widened to 32 bits when it is multiplied, a
block at a time: half as much is read and resident. A processor without 16-bit instructions computes many times faster
this way.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from port_agent.finetuning.inputs.libraries import Conv1D
from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.quantized.linear import WeightProduct, product_in_blocks
from port_agent.intercept.tiles.products import STORED
from port_planner.base.units import format_bytes

SHORT = (torch.bfloat16, torch.float16)

_MAX_COPIED_BYTES = 64 << 20
"""Largest number of bytes of other 16-bit tensors (norms, biases, convolutions of a few
channels), which are widened once.
"""


class _ShownWeight(torch.Tensor):
    """A stand-in from which a weight's shape, type and device are read; a product with it would use the wrong numbers,
    and is rejected.
    """

    _ANSWERED = frozenset({"__get__", "element_size", "numel", "size", "dim", "__repr__"})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in cls._ANSWERED:
            raise RuntimeError(f"{func.__name__} of a weight that stays in 16 bits in its file; call its layer")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class _WidenedLayer(nn.Module):
    """A layer with a table: a weight as it is in its file."""

    table: torch.Tensor

    def __init__(self, table: torch.Tensor) -> None:
        """`table`: one tensor for all layers that share the weight."""
        nn.Module.__init__(self)
        self.register_buffer("table", table, persistent=False)
        self._shown = torch.empty(1).expand(table.shape).as_subclass(_ShownWeight)


class WidenedLinear(_WidenedLayer, nn.Linear):
    """A linear layer, or a head, over a frozen 16-bit weight, [out, in]."""

    def __init__(self, layer: nn.Linear, table: torch.Tensor) -> None:
        super().__init__(table)
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.register_parameter("bias", _in_32_bits(layer.bias))

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """A stand-in for the weight: its shape in 32 bits, and the device for adapters."""
        return self._shown

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product in 32 bits, [..., out], for an input of [..., in]."""
        product: Any = WeightProduct.apply
        flat = input.reshape(-1, self.in_features)
        out: torch.Tensor = product(flat, self.table, _NO_SCALES, self.bias, STORED, torch.float32, False)
        return out.view(*input.shape[:-1], self.out_features)

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input, [rows, in], from that of the output, [rows, out]."""
        return product_in_blocks("grid_input_gradient", gradient, self.table, _NO_SCALES, None, STORED, torch.float32)


class WidenedConv1D(_WidenedLayer, Conv1D):
    """A layer of GPT-2's kind over a frozen 16-bit weight, [in, out]."""

    def __init__(self, layer: Any, table: torch.Tensor) -> None:
        super().__init__(table)
        self.nx, self.nf = layer.weight.shape
        self.register_parameter("bias", _in_32_bits(layer.bias))

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """A stand-in for the weight: its shape in 32 bits, and the device for adapters."""
        return self._shown

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product in 32 bits, [..., out], for an input of [..., in]."""
        product: Any = WeightProduct.apply
        flat = x.reshape(-1, self.nx)
        out: torch.Tensor = product(flat, self.table, _NO_SCALES, self.bias, STORED, torch.float32, True)
        return out.view(*x.shape[:-1], self.nf)


class WidenedEmbedding(_WidenedLayer):
    """A table of embeddings in 16 bits; its class decides what happens to the rows that are looked up."""

    def __init__(self, layer: nn.Embedding, table: torch.Tensor) -> None:
        super().__init__(table)
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        layer.register_parameter("weight", None)  # it receives the rows
        self.kind = layer
        layer.padding_idx = None  # it would only affect a trained table

    @property
    def weight(self) -> torch.Tensor:
        """A stand-in for the table: its shape in 32 bits."""
        return self._shown

    def forward(self, input: torch.Tensor) -> Any:
        """Return the layer's result for the looked-up rows, in 32 bits."""
        rows = nn.functional.embedding(input.reshape(-1), self.table).to(torch.float32)
        places = torch.arange(rows.shape[0]).view(input.shape)
        return functional_call(self.kind, {"weight": rows}, (places,))


def widen(model: Any, in_32_bits: Any) -> int:
    """Make a frozen model compute in 32 bits over its 16-bit weights; return the bytes that stay in 16 bits.

    `in_32_bits`: the same model created in float32, without weights; in 16 bits, values that it computes from
    its configuration would be rounded. Raises FinetuneError, naming the weight, if weights of other layers
    are too large to be widened.
    """
    tables: dict[torch.Tensor, torch.Tensor] = {}
    for name, layer in list(model.named_modules()):
        if _weight_dtype(layer) not in SHORT:
            continue
        table = tables.setdefault(layer.weight, layer.weight.detach())
        if type(layer) is nn.Linear:
            model.set_submodule(name, WidenedLinear(layer, table))
        elif type(layer) is Conv1D:
            model.set_submodule(name, WidenedConv1D(layer, table))
        elif isinstance(layer, nn.Embedding) and layer.max_norm is None:
            model.set_submodule(name, WidenedEmbedding(layer, table))
    _take_rest_to_32_bits(model)
    in_file = in_32_bits.state_dict().keys()
    for name, buffer in in_32_bits.named_buffers():
        owner, _, key = name.rpartition(".")
        if name not in in_file:
            setattr(_below_widened(model, owner), key, buffer)
    model.config.dtype = torch.float32
    return sum(
        table.nbytes
        for table in {id(m.table): m.table for m in model.modules() if isinstance(m, _WidenedLayer)}.values()
    )


def stored_weight(layer: Any) -> torch.Tensor:
    """Return a layer's weight as it is stored, or the weight of a layer of another type."""
    weight: torch.Tensor = layer.table if isinstance(layer, _WidenedLayer) else layer.weight
    return weight


def _weight_dtype(layer: nn.Module) -> torch.dtype | None:
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    return None if weight is None else weight.dtype


def _below_widened(model: Any, owner: str) -> nn.Module:
    module: nn.Module = model.get_submodule(owner)
    return module.kind if isinstance(module, WidenedEmbedding) else module


def _in_32_bits(bias: torch.Tensor | None) -> nn.Parameter | None:
    return None if bias is None else nn.Parameter(bias.detach().to(torch.float32), requires_grad=False)


def _take_rest_to_32_bits(model: Any) -> None:
    rest = list(_short_tensors(model))
    copied = sum(tensor.numel() * torch.float32.itemsize for _, tensor in rest)
    if copied > _MAX_COPIED_BYTES:
        name, largest = max(rest, key=lambda pair: pair[1].numel())
        raise FinetuneError(
            "--compute float32 supports linear layers and embeddings; the other layers of this "
            f"{model.config.model_type} take {format_bytes(copied)} in 32 bits ({name} {list(largest.shape)} first): "
            "use --compute stored"
        )
    for _, tensor in rest:
        tensor.data = tensor.data.to(torch.float32)


def _short_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the remaining 16-bit tensors except tables, each once."""
    seen = {id(module.table) for module in model.modules() if isinstance(module, _WidenedLayer)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype in SHORT and id(tensor) not in seen:
            yield name, tensor


_NO_SCALES = torch.empty(0)
