"""Model directories whose linear weights are codes of bitsandbytes, GPTQ or AWQ, packed one code at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from port_agent.packing.quantized import NF4_LEVELS
from tests.agent.finetuning.tiny_model import make_model

GROUP = 16
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word has the code of each of eight columns."""

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a layer by the ends of their names, and the weight that they stand for, [outputs, inputs]."""


def _words(codes: torch.Tensor, bits: int, places: tuple[int, ...]) -> torch.Tensor:
    """Return codes of [n, m] as words of 32 bits, [n, m / codes in a word]; `places`: of
    neighbouring codes in a word.
    """
    words = torch.zeros(codes.shape[0], codes.shape[1] // len(places), dtype=torch.int64)
    for column in range(codes.shape[1]):
        words[:, column // len(places)] |= codes[:, column] << bits * places[column % len(places)]
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _in_order(bits: int) -> tuple[int, ...]:
    return tuple(range(32 // bits))


def gptq_layer(outputs: int, inputs: int, bits: int = 4, *, offset: int = 1, in_order: bool = True) -> Packed:
    """Return a layer of GPTQ.

    `offset`: what the format takes off the zeros; `in_order`: whether groups are neighbours.
    """
    groups = torch.arange(inputs) // GROUP if in_order else torch.randperm(inputs) // GROUP
    codes = torch.randint(0, 1 << bits, (outputs, inputs))
    zeros = torch.randint(1, 1 << bits, (inputs // GROUP, outputs))
    scales = torch.rand(inputs // GROUP, outputs).half()
    weight = torch.empty(outputs, inputs)
    for column in range(inputs):
        group = groups[column]
        weight[:, column] = (codes[:, column] - zeros[group]) * scales[group].float()
    tensors = {
        ".qweight": _words(codes, bits, _in_order(bits)).T.contiguous(),
        ".qzeros": _words(zeros - offset, bits, _in_order(bits)),
        ".scales": scales,
        ".g_idx": groups.int(),
    }
    return tensors, weight


def awq_layer(outputs: int, inputs: int) -> Packed:
    """Return a layer of AWQ."""
    codes, zeros = torch.randint(0, 16, (inputs, outputs)), torch.randint(0, 16, (inputs // GROUP, outputs))
    scales = torch.rand(inputs // GROUP, outputs).half()
    weight = (codes - zeros.repeat_interleave(GROUP, 0)) * scales.float().repeat_interleave(GROUP, 0)
    words = {end: _words(given, 4, _AWQ_PLACES) for end, given in ((".qweight", codes), (".qzeros", zeros))}
    return {**words, ".scales": scales}, weight.T.contiguous()


def nf4_layer(outputs: int, inputs: int, *, nested: bool = False) -> Packed:
    """Return a layer of bitsandbytes. `nested`: whether scales are codes, too."""
    levels, block = torch.tensor(NF4_LEVELS), 64
    codes = torch.randint(0, 16, (outputs * inputs,))
    codes[::block] = 15  # each block has its scale itself, as an encoder leaves it
    scales, beside = torch.rand(codes.numel() // block) + 0.1, {}
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [outputs, inputs]}
    stored = scales
    if nested:
        stored = torch.randint(0, 256, scales.shape, dtype=torch.uint8)
        outer, table = torch.rand(-(-len(stored) // 4)), torch.rand(256)
        for place, code in enumerate(stored.tolist()):
            scales[place] = table[code] * outer[place // 4] + 0.5
        beside = {".weight.nested_absmax": outer, ".weight.nested_quant_map": table}
        state |= {"nested_blocksize": 4, "nested_offset": 0.5, "nested_dtype": "float32"}
    weight = (levels[codes] * scales.repeat_interleave(block)).view(outputs, inputs)
    tensors = {
        ".weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], ".weight.absmax": stored, ".weight.quant_map": levels,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8), **beside,
    }  # fmt: skip
    return tensors, weight


def make_coded(
    folder: Path, layer: Callable[[int, int], Packed], quantization: dict[str, Any]
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a model whose attention's weights are codes; return its directory, and all its weights as floats."""
    make_model(folder, 64)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    weights = load_file(folder / "model.safetensors")
    tensors = dict(weights)
    torch.manual_seed(3)
    for name in [name for name in weights if "self_attn" in name]:
        module = name.removesuffix(".weight")
        made, weight = layer(*weights[name].shape)
        del tensors[name]
        tensors |= {f"{module}{end}": tensor for end, tensor in made.items()}
        weights[name] = weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, weights
