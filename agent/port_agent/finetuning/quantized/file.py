"""A model's quantized linear weights, computed once and kept in a file next to the model."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from port_agent.finetuning.inputs.libraries import Conv1D
from port_agent.finetuning.inputs.model_files import weight_files
from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.quantized.linear import (
    Array,
    QuantizedConv1D,
    QuantizedLinear,
    codes_of,
    quantized_blocks,
    scales_of,
)
from port_agent.packing.quantized import Quantization
from port_agent.system.atomic_file import atomic_stream
from port_planner.base.units import format_bytes
from port_planner.ir.bundle import safetensors_io
from port_planner.ir.bundle.safetensors_io import Chunks

FOLDER = ".port-agent"
"""Folder in the model's directory."""

_FORMAT = "1"
ENCODED_ITEMS = 1 << 19
"""Weights encoded at once, which takes about 10 MiB of temporary memory."""

_OWN_PRODUCTS = ("FalconLinear",)
"""Linear layers of particular kinds of models that return the same as any linear layer."""

_DECODED = (torch.bfloat16, torch.float32)

Note = Callable[[str], None]


class _Source(msgspec.Struct, frozen=True):
    """A weight file that was read: its state, and the SHA-256 of its bytes."""

    size: int
    modified_ns: int
    sha256: str


def quantize_model(model: Any, folder: Path, quantization: Quantization, note: Note) -> None:
    """Quantize the weights of a model's linear layers except its head, and freeze everything.

    The codes are read from `folder`/.port-agent, where they are written the first time, or again if the model's files
    have changed. Raises FinetuneError for a model without such layers, and if the file cannot be written.
    """
    layers = quantized_layers(model, quantization)
    path = folder / FOLDER / f"{quantization.value}.safetensors"
    sources = {p.name: p for p in weight_files(folder)}
    if (why := _why_not_usable(path, sources)) is not None:
        note(f"{path} {why}: {len(layers)} linear layers are quantized to {quantization.value}, once")
        _write(path, layers, quantization, sources)
    stored: Any = safe_open(path, "pt")
    for name, layer in layers.items():
        codes, scales = stored.get_tensor(f"{name}.codes"), stored.get_tensor(f"{name}.scales")
        kind = QuantizedConv1D if isinstance(layer, Conv1D) else QuantizedLinear
        model.set_submodule(name, kind(quantization, codes, scales, layer.bias, layer.weight.dtype))
    quantized = sum(layer.weight.numel() for layer in layers.values())
    note(
        f"{quantized / 1e6:,.0f} million weights are quantized to {quantization.value}, in "
        f"{format_bytes(path.stat().st_size)}; this quantized model is the one that is trained, not the original"
    )


def quantized_layers(model: Any, quantization: Quantization) -> dict[str, nn.Linear | Conv1D]:
    """Return by name the layers of a model that can be quantized. Raises FinetuneError if there are none."""
    head = model.get_output_embeddings()
    linear = {n: m for n, m in model.named_modules() if returns_product(m) and m is not head and _adds_bias_at_once(m)}
    layers = {
        n: m for n, m in linear.items() if m.weight.shape[1] % quantization.block == 0 and m.weight.dtype in _DECODED
    }
    if not layers:
        why = (
            "has no linear layers"
            if not linear
            else (
                f"has {len(linear)}, none of bfloat16 or float32 with rows of a multiple of {quantization.block} "
                "weights"
            )
        )
        raise FinetuneError(
            f"--base {quantization.value} is for linear layers, and this {model.config.model_type} {why}; train it "
            "without --base"
        )
    return layers


def returns_product(layer: nn.Module) -> bool:
    """Return whether a layer is linear and returns only its product.

    A layer of one kind of model, such as a mixture's router, may return more.
    """
    kind = type(layer)
    is_own = kind.__module__.startswith("transformers.models.") and kind.__name__ not in _OWN_PRODUCTS
    return isinstance(layer, nn.Linear | Conv1D) and not is_own


def _adds_bias_at_once(layer: Any) -> bool:
    """Return whether a layer has the bits of a product that includes its bias."""
    return layer.bias is None or type(layer).__name__ not in _OWN_PRODUCTS


def _why_not_usable(path: Path, sources: dict[str, Path]) -> str | None:
    """Return why a file of codes cannot be used; None if it was made from the model's files as they are."""
    if not path.is_file():
        return "does not exist"
    try:
        with safe_open(path, "pt") as stored:
            metadata = stored.metadata() or {}
        made_of = msgspec.json.decode(metadata.get("sources", ""), type=dict[str, _Source])
    except (SafetensorError, msgspec.DecodeError, OSError):
        return "is damaged"
    if metadata.get("format") != _FORMAT or made_of.keys() != sources.keys():
        return "was made from other files"
    for name, source in sources.items():
        facts, was = source.stat(), made_of[name]
        same = (facts.st_size, facts.st_mtime_ns) == (was.size, was.modified_ns)
        if not same and (facts.st_size != was.size or _sha256(source) != was.sha256):
            return f"was made from a different {name}"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(
    path: Path, layers: dict[str, nn.Linear | Conv1D], quantization: Quantization, sources: dict[str, Path]
) -> None:
    made_of = {n: _Source(p.stat().st_size, p.stat().st_mtime_ns, _sha256(p)) for n, p in sources.items()}
    tensors: dict[str, Chunks] = {}
    for name, layer in layers.items():
        rows, items = layer.weight.shape
        codes, scales = _codes(name, layer, quantization), _scales(name, layer, quantization)
        tensors[f"{name}.codes"] = Chunks("uint8", (rows, items * quantization.code_bits // 8), codes)
        tensors[f"{name}.scales"] = Chunks("float32", (rows, items // quantization.block), scales)
    metadata = {"format": _FORMAT, "grid": quantization.value, "sources": msgspec.json.encode(made_of).decode()}
    nbytes = len(safetensors_io.encoded_header(tensors, metadata)) + sum(
        safetensors_io.tensor_bytes(chunks.dtype, chunks.shape) for chunks in tensors.values()
    )
    try:
        path.parent.mkdir(exist_ok=True)
        with atomic_stream(path, nbytes) as stream:
            for chunk in safetensors_io.encode(tensors, metadata):
                stream.write(chunk)
    except OSError as error:
        raise FinetuneError(
            f"{path} of {format_bytes(nbytes)} cannot be written ({error.strerror}); free some space there, or copy "
            "the model to a directory that you may write"
        ) from error


def _codes(name: str, layer: Any, quantization: Quantization) -> Callable[[], Iterator[memoryview]]:
    """Return a function that yields the codes of a layer, some rows at a time."""

    def chunks() -> Iterator[memoryview]:
        for blocks, scales in _encoded(name, layer, quantization):
            yield codes_of(quantization, blocks, scales).data.cast("B")

    return chunks


def _scales(name: str, layer: Any, quantization: Quantization) -> Callable[[], Iterator[memoryview]]:
    """Return a function that yields the scales of a layer, some rows at a time."""
    return lambda: (scales.data.cast("B") for _, scales in _encoded(name, layer, quantization))


def _encoded(name: str, layer: Any, quantization: Quantization) -> Iterator[tuple[Array, Array]]:
    """Yield rows of a layer in blocks, with their scales. Raises FinetuneError if a weight is not a valid number."""
    weight = layer.weight.detach()
    step = max(1, ENCODED_ITEMS // weight.shape[1])
    for first in range(0, weight.shape[0], step):
        blocks = quantized_blocks(quantization, weight[first : first + step])
        try:
            scales = scales_of(quantization, blocks)
        except ValueError as error:
            raise FinetuneError(f"{name}: {error}; the model's files are damaged, download them again") from error
        yield blocks, scales
