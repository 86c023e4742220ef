"""A GGUF file as a model of transformers: its configuration, its tokenizer, and its weights,
decoded some rows at a time.

It reads the kinds of models that `export` writes. The resulting configuration must reproduce each setting of the file;
a setting without a place in it is rejected by name.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from port_agent.finetuning.decoding.gguf_words import check_tokens, named_ends, tokenizer_from
from port_agent.finetuning.decoding.weight import DecodedWeight
from port_agent.finetuning.export.shape import KINDS, GgufShape, class_name
from port_agent.finetuning.inputs.libraries import transformers
from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text.tokenizing import load_tokenizer
from port_planner.base.units import shown

try:
    import gguf
except ImportError as error:
    raise FinetuneError(
        f"reading GGUF needs the package gguf ({error.name} is missing): pip install 'port-agent[gguf]'"
    ) from error

_LAYOUT_ALONE = frozenset(("tensor_data_layout",))
"""Settings that do not change what a model computes."""
_FACTORS = "rope_freqs.weight"
_LLAMA3_FACTORS = (8.0, 32.0)
"""Factors by which Llama 3.1 and 3.2 stretch their positions; a file contains only the resulting divisors."""
_LLAMA3_POSITIONS = 8192
_FACTORS_TOLERANCE = 1e-5
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """`config`, `tokenizer`: of transformers; `ends`: the tokens that end an answer;
    `weights`: by transformers' names.
    """

    config: Any
    tokenizer: Any
    ends: list[int]
    weights: dict[str, DecodedWeight]


def read_gguf(path: Path, tokenizer: Path | None) -> GgufModel:
    """Return the model of a file. `tokenizer`: a directory with the tokenizer to use instead of the file's.

    Raises FinetuneError for a damaged file, and for parts that cannot be read exactly.
    """
    try:
        reader = gguf.GGUFReader(path)
        given = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise FinetuneError(f"{path} is not a GGUF file or is damaged ({error}); download it again") from error
    if given.get("split.count", 1) > 1:
        raise FinetuneError(
            f"{path} is one of {given['split.count']} parts; make one file of them: llama-gguf-split --merge FIRST "
            "WHOLE"
        )
    stored = {tensor.name: tensor for tensor in reader.tensors}
    try:
        shape = _shape(path, given, stored)
        words = _tokenizer(given, tokenizer, shape)
    except KeyError as error:
        raise FinetuneError(f"{path} lacks the setting {error}; it is damaged, download it again") from error
    _take_marks(shape.config, words)
    return GgufModel(shape.config, words, named_ends(given), _weights(path, shape, stored))


def _shape(path: Path, given: Mapping[str, Any], stored: Mapping[str, Any]) -> GgufShape:
    kind = given["general.architecture"]
    if kind not in KINDS:
        raise FinetuneError(
            f"{path} is a {shown(str(kind))}, and decode reads {', '.join(KINDS)}; use the original model"
        )
    shape = _with_factors(_plain_shape(kind, given, "output.weight" not in stored), stored)
    made = dict(shape.settings())
    for key, value in given.items():
        name = key.removeprefix(f"{kind}.")
        if name == key or name in _LAYOUT_ALONE or _is_equal(made.get(name), value):
            continue
        raise FinetuneError(
            f"{path} has {shown(key)} = {shown(str(value))}, which decode does not read; use the original model"
        )
    return shape


def _is_equal(made: object, given: object) -> bool:
    """Return whether two settings are equal in a file, which has numbers of 32 bits."""
    if isinstance(made, float) and isinstance(given, int | float):
        return bool(np.float32(made) == np.float32(given))
    return made == given


def _plain_shape(kind: str, given: Mapping[str, Any], tied: bool) -> GgufShape:
    """Return the shape of a model whose frequencies have no divisors. Raises KeyError for a missing setting."""
    of = {key.removeprefix(f"{kind}."): value for key, value in given.items() if key.startswith(f"{kind}.")}
    heads, width = of["attention.head_count"], of["embedding_length"]
    rope = {"rope_type": "default", "rope_theta": _shortest(of.get("rope.freq_base", 10000.0))}
    if of.get("rope.scaling.type", "none") == "linear":
        rope |= {"rope_type": "linear", "factor": _shortest(of["rope.scaling.factor"])}
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=len(given["tokenizer.ggml.tokens"]),
        hidden_size=width,
        intermediate_size=of["feed_forward_length"],
        num_hidden_layers=of["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=of.get("attention.head_count_kv", heads),
        head_dim=of.get("attention.key_length", width // heads),
        max_position_embeddings=of["context_length"],
        rms_norm_eps=_shortest(of["attention.layer_norm_rms_epsilon"]),
        rope_parameters=dict(rope),
        tie_word_embeddings=tied,
        architectures=[class_name(kind)],
    )
    return GgufShape(kind, config, rope)


def _with_factors(shape: GgufShape, stored: Mapping[str, Any]) -> GgufShape:
    """Return a shape whose frequencies have the file's divisors, if it has any.

    Raises FinetuneError for unknown ones.
    """
    if _FACTORS not in stored:
        return shape
    wanted = torch.from_numpy(np.array(stored[_FACTORS].data, np.float32))
    for factor in _LLAMA3_FACTORS:
        rope = {
            **shape.rope, "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": _LLAMA3_POSITIONS,
        }  # fmt: skip
        shape.config.rope_parameters = rope
        made = replace(shape, rope=rope).rope_factors()
        if made is not None and made.shape == wanted.shape and torch.allclose(made, wanted, rtol=_FACTORS_TOLERANCE):
            return replace(shape, rope=rope)
    raise FinetuneError(
        f"{_FACTORS} is not that of Llama 3.1 or 3.2, and decode reads no other; use the original model"
    )


def _shortest(value: float) -> float:
    """Return the shortest number that is `value` in 32 bits: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tokenizer(given: Mapping[str, Any], folder: Path | None, shape: GgufShape) -> Any:
    if folder is None:
        return tokenizer_from(given, shape.config.max_position_embeddings)
    words = load_tokenizer(folder)
    check_tokens(words, given, str(folder))
    return words


def _take_marks(config: Any, tokenizer: Any) -> None:
    """Set a tokenizer's marks in a configuration."""
    for mark in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, mark, getattr(tokenizer, mark))


def _weights(path: Path, shape: GgufShape, stored: Mapping[str, Any]) -> dict[str, DecodedWeight]:
    names = shape.names()
    missing, others = sorted(set(names.values()) - set(stored)), sorted(set(stored) - set(names.values()) - {_FACTORS})
    if missing:
        raise FinetuneError(
            f"{path} lacks {len(missing)} of {len(names)} weights, {missing[0]} first; download it again"
        )
    if others:
        raise FinetuneError(
            f"{path} has {len(others)} weights that a {shape.kind} does not have, {shown(others[0])} first; use the "
            "original model"
        )
    return {name: _weight(stored[there], shape.rows(name)) for name, there in names.items()}


def _weight(tensor: Any, order: torch.Tensor | None) -> DecodedWeight:
    """Return a weight with its rows in transformers' order; `order`: the order in which they are stored."""
    back = None if order is None else torch.argsort(order).numpy()
    rows = functools.partial(_decoded, tensor, back)
    try:
        rows(0, 1)
    except NotImplementedError as error:
        raise FinetuneError(
            f"{tensor.name} is {tensor.tensor_type.name}, which the package gguf does not decode; use another file of "
            "the model"
        ) from error
    shape = tuple(reversed(tensor.shape.tolist()))
    return DecodedWeight(shape, rows, is_coded=tensor.tensor_type.name not in _FLOATS)


def _decoded(tensor: Any, order: "np.ndarray[Any, Any] | None", start: int, stop: int) -> torch.Tensor:
    part = tensor.data[start:stop] if order is None else tensor.data[order[start:stop]]
    return torch.from_numpy(np.array(gguf.quants.dequantize(part, tensor.tensor_type), np.float32))
