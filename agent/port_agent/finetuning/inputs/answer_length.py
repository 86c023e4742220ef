"""The longest answer, with the text before it, if no length is requested. Does not import torch."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from port_agent.finetuning.inputs.model_files import CONFIG

PACKED_TOKENS = 256
"""Number of tokens to which texts are packed by default, and the smallest limit of an answer."""
_MAX_TOKENS = 2048
_STEP = 32
_SHARE = 1 / 4
"""Shares of the budget for what one layer computes from a sequence, and for the inputs of all layers."""
_ITEM_BYTES = 4
_WIDE, _MIDDLE = 8, 3
"""Numbers of tensors that a layer holds at once with their gradients: of the layer's width, and
of the width of its middle.
"""

_WIDTHS, _MIDDLES = (
    ("hidden_size", "n_embd", "d_model"),
    ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim"),
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_POSITIONS = ("max_position_embeddings", "n_positions")


def longest_answer(model: Path, ram_bytes: int, *, with_head: bool) -> int:
    """Return the largest number of tokens of an answer that fits into a budget with this model,
    by its configuration alone.

    `with_head`: all logits and their gradients exist at once. The result is at least `PACKED_TOKENS`, which is
    also the result for a model whose configuration does not name its sizes. `ram_bytes`: the budget divided by
    the sequences of a batch.
    """
    config = json.loads((model / CONFIG).read_bytes())
    config = config.get("text_config") or config
    width, layers = _first(config, _WIDTHS), _first(config, _LAYERS)
    if not width or not layers:
        return PACKED_TOKENS
    middle = _first(config, _MIDDLES) or 4 * width
    items = (_WIDE + layers) * width + _MIDDLE * middle + (2 * _first(config, ("vocab_size",)) if with_head else 0)
    fitting = int(ram_bytes * _SHARE) // (items * _ITEM_BYTES) // _STEP * _STEP
    return max(PACKED_TOKENS, min(fitting, _MAX_TOKENS, _first(config, _POSITIONS) or _MAX_TOKENS))


def _first(config: Mapping[str, Any], names: Iterable[str]) -> int:
    """Return the first of some settings that a configuration has, or 0."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)
