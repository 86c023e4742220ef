"""Make the configuration of a published architecture tiny, by the names of its fields."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCABULARY = 256
TEXT_LENGTH = 48
IMAGE_SIZE = 64
WIDTH = 64
HEADS = 4
INNER = 128

_WIDTHS = re.compile(
    r"^(hidden_size|d_model|n_embd|dim|embed_dim|hidden_dim|d_embed|embedding_size|emb_dim|model_dim|d_hidden|n_embed|width|"
    r"(text|vision|encoder|decoder|audio|word|output|projection|cross_attention|adapter|lstm|kv)_?(hidden_size|hidden_dim|embed_dim|dim|d_model|"
    r"embedding_size|hidden)|out_hidden_size|output_dim|conv_dim_out|feature_size|mask_feature_size|fpn_feature_size|"
    r"d_latents|num_feat|decoder_hidden_dim|encoder_hidden_dim)$"
)
_LAYERS = re.compile(r"(layers|_blocks|n_layer|^depth|_depth|layer_num|num_blocks|n_layers|num_layers_.*)$")
_HEADS = re.compile(r"(attention_heads|num_heads|n_head|n_heads|_heads|head_count|self_attends)$")
_HEAD_WIDTHS = re.compile(r"^(head_dim|.*_head_dim|d_kv|kv_channels|head_size|attention_head_dim)$")
_INNERS = re.compile(
    r"(intermediate_size|ffn_dim|d_ff|inner_dim|ffn_hidden_size|mlp_dim|d_inner|_ffn_size|dim_feedforward|feed_forward.*size)$"
)
_VOCABULARIES = re.compile(r"(vocab_size|codebook_size|num_embeddings|vocab_size_.*)$")
_POSITIONS = re.compile(
    r"^(max_position_embeddings|n_positions|max_seq_len.*|max_source_positions|max_target_positions|n_ctx|max_length|.*max_sequence_length)$"
)
_IMAGES = re.compile(r"^(image_size|img_size|input_size|sample_size)$")
_EXPERTS = re.compile(
    r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts|encoder_num_experts|n_experts)$"
)
_CHOSEN_EXPERTS = re.compile(r"^(num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_selected_experts|moe_top_k)$")
_DROPOUTS = re.compile(r"(dropout|drop_path|layerdrop|dropout_rate|_drop|pdrop|dropout_prob|drop_rate)")
_TOKENS = re.compile(r"(token_id|token_index|token_ids)$")
_WIDTH_LISTS = re.compile(
    r"^(hidden_sizes|embed_dims|dims|neck_hidden_sizes|encoder_hidden_sizes|decoder_hidden_sizes|block_out_channels|out_channels|conv_dim|stem_channels|channels|widths)$"
)
_DEPTH_LISTS = re.compile(r"^(depths|num_blocks|layers_per_block|blocks_per_stage|depth)$")
_HEAD_LISTS = re.compile(r"^(num_heads|num_attention_heads|heads|attention_head_dim)$")


_FOLLOW_FROM_OTHERS = frozenset({"out_features", "out_indices", "stage_names", "transformers_version"})
_AS_LONG_AS_A_LIST = frozenset({"num_feat_extract_layers"})
_WINDOWS = re.compile(r"^window_size$")


@dataclass(frozen=True, slots=True)
class Reach:
    """Which fields are made smaller; if a model cannot be made with all of them smaller, it often can with fewer."""

    widths: bool = True
    lists: bool = True
    images: bool = True
    dropout: float = 0.1


REACHES = (
    Reach(),
    Reach(dropout=0.0),
    Reach(lists=False),
    Reach(images=False, lists=False),
    Reach(widths=False, lists=False, images=False),
)


def shrink(fields: Mapping[str, Any], reach: Reach) -> dict[str, Any]:
    """Return the fields of a configuration, and of those inside it, with tiny values."""
    small = {name: _field(name, value, reach) for name, value in fields.items() if name not in _FOLLOW_FROM_OTHERS}
    if "pad_token_id" in small:
        small["pad_token_id"] = 0
    tokens = {k: v for k, v in small.items() if _TOKENS.search(k) and isinstance(v, int) and v >= VOCABULARY}
    for i, name in enumerate(sorted(tokens)):
        small[name] = VOCABULARY - 1 - i
    if isinstance(pattern := small.get("layer_types"), list) and isinstance(
        count := small.get("num_hidden_layers"), int
    ):
        small["layer_types"] = _spread(pattern, count)
    return small


def _spread(pattern: list[Any], count: int) -> list[Any]:
    """Return `count` entries with as many kinds of the pattern as there is room for."""
    kinds = list(dict.fromkeys(pattern))
    return [kinds[i % len(kinds)] for i in range(count)] if kinds else pattern


def _field(name: str, value: Any, reach: Reach) -> Any:
    if isinstance(value, Mapping):
        named = "rope" not in name and all(isinstance(key, str) for key in value)
        return shrink(value, reach) if named else dict(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return _integer(name, value, reach)
    if isinstance(value, float):
        return reach.dropout if value == 0.0 and _DROPOUTS.search(name) else value
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
        return type(value)(_list(name, list(value), reach))
    if isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
        return [shrink(v, reach) for v in value]
    return value


def _integer(name: str, value: int, reach: Reach) -> int:
    if _TOKENS.search(name) or name in _AS_LONG_AS_A_LIST:
        return value
    if name == "num_key_value_heads" or name.endswith("kv_heads"):
        return min(value, 2) if reach.widths else value
    small = {
        _LAYERS: 2,
        _VOCABULARIES: VOCABULARY,
        _POSITIONS: 512,
        _EXPERTS: 4,
        _CHOSEN_EXPERTS: 2,
    }
    if reach.widths:
        small |= {_WIDTHS: WIDTH, _HEADS: HEADS, _HEAD_WIDTHS: WIDTH // HEADS, _INNERS: INNER}
    if reach.images:
        small |= {_IMAGES: IMAGE_SIZE, _WINDOWS: 2}
    for pattern, limit in small.items():
        if pattern.search(name):
            return min(value, limit)
    return value


def _list(name: str, values: list[int], reach: Reach) -> list[int]:
    if _DEPTH_LISTS.search(name):
        return [min(v, 2) for v in values]
    if _IMAGES.search(name):
        return [min(v, IMAGE_SIZE) for v in values] if reach.images else values
    if not reach.lists:
        return values
    if _WIDTH_LISTS.search(name):
        return [min(v, 32 << min(i, 2)) for i, v in enumerate(values)]
    if _HEAD_LISTS.search(name):
        return [1 if v == 1 else 2 if v < 6 else 4 for v in values]
    return values
