"""The description of a model in GGUF: its architecture, its settings, and the names and the order of its weights.

Only kinds of models whose every setting has a place there are written. Anything else is rejected by name and left to
llama.cpp's own converter.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from port_agent.finetuning.inputs.libraries import transformers
from port_agent.finetuning.inputs.options import FinetuneError
from port_planner.base.units import shown

CONVERTER = "python convert_hf_to_gguf.py (of llama.cpp)"
"""Program for models that this package rejects."""

KINDS = ("llama", "qwen2", "qwen3")
"""Model types of transformers, with the same names in GGUF."""

_WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_HEAD = "lm_head.weight"
_LAYERS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_QWEN3_LAYERS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_BIASES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ROPE_SCALINGS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class GgufShape:
    """A model's `kind`, its configuration, and the settings of its rotary positions."""

    kind: str
    config: Any
    rope: dict[str, Any]

    @property
    def head_size(self) -> int:
        """Items of an attention head."""
        given: int | None = getattr(self.config, "head_dim", None)
        return given or int(self.config.hidden_size) // int(self.config.num_attention_heads)

    def names(self) -> dict[str, str]:
        """Return GGUF's name of each weight, by transformers' name, in the order in which weights are written."""
        biases = _BIASES if self.kind == "qwen2" else ()
        layers = {**_LAYERS, **(_QWEN3_LAYERS if self.kind == "qwen3" else {})}
        found = dict(_WHOLE)
        if not self.config.tie_word_embeddings:
            found[_HEAD] = "output.weight"
        for layer in range(self.config.num_hidden_layers):
            for name, there in layers.items():
                found[f"model.layers.{layer}.{name}.weight"] = f"blk.{layer}.{there}.weight"
            for name in biases:
                found[f"model.layers.{layer}.{name}.bias"] = f"blk.{layer}.{layers[name]}.bias"
        return found

    def check_names(self, stored: Collection[str]) -> None:
        """Raise FinetuneError, naming a weight, if the stored weights are not those of this kind of model."""
        wanted = set(self.names())
        ignored = {name for name in stored if name.endswith("rotary_emb.inv_freq") or name == _HEAD}
        missing, others = sorted(wanted - set(stored)), sorted(set(stored) - wanted - ignored)
        if missing:
            raise FinetuneError(
                f"{len(missing)} of {len(wanted)} weights are not stored, {shown(missing[0])} first; save the model "
                "again with transformers"
            )
        if others:
            raise FinetuneError(
                f"GGUF's {self.kind} has no place for {len(others)} weights, {shown(others[0])} first; convert the "
                f"model with {CONVERTER}"
            )

    def rows(self, name: str) -> torch.Tensor | None:
        """Return the order in which a weight's rows are written; None for their own order.

        llama.cpp rotates neighbours of a Llama's head, and transformers the two halves of it.
        """
        found = re.search(r"self_attn\.([qk])_proj\.", name)
        if self.kind != "llama" or found is None:
            return None
        heads = self.config.num_attention_heads if found[1] == "q" else self.config.num_key_value_heads
        return torch.arange(heads * self.head_size).view(heads, 2, self.head_size // 2).transpose(1, 2).reshape(-1)

    def rope_factors(self) -> torch.Tensor | None:
        """Return the divisors of the rotary frequencies, [head size / 2] in 32 bits; None if all
        frequencies follow from one number.
        """
        if self.rope["rope_type"] != "llama3":
            return None
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](self.config, torch.device("cpu"))
        powers = torch.arange(0, self.head_size, 2).float() / self.head_size
        plain: torch.Tensor = 1.0 / self.rope["rope_theta"] ** powers
        return plain / scaled

    def settings(self) -> Iterator[tuple[str, int | float | str]]:
        """Yield the settings of GGUF's architecture: keys without the kind in front, and values."""
        config = self.config
        yield "vocab_size", config.vocab_size
        yield "context_length", config.max_position_embeddings
        yield "embedding_length", config.hidden_size
        yield "block_count", config.num_hidden_layers
        yield "feed_forward_length", config.intermediate_size
        yield "attention.head_count", config.num_attention_heads
        yield "attention.head_count_kv", config.num_key_value_heads
        yield "attention.key_length", self.head_size
        yield "attention.value_length", self.head_size
        yield "attention.layer_norm_rms_epsilon", float(config.rms_norm_eps)
        yield "rope.dimension_count", self.head_size
        yield "rope.freq_base", float(self.rope["rope_theta"])
        if self.rope["rope_type"] == "linear":
            yield "rope.scaling.type", "linear"
            yield "rope.scaling.factor", float(self.rope["factor"])


def shape_of(folder: Path) -> GgufShape:
    """Return the description in GGUF of the model of a directory.

    Raises FinetuneError for parts that have no place there.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = config.model_type
    if kind not in KINDS or config.architectures not in (None, [class_name(kind)]):
        what = ", ".join(config.architectures or (kind,))
        raise FinetuneError(
            f"{folder} is a {shown(what)}, and export writes {', '.join(map(class_name, KINDS))}; convert it with "
            f"{CONVERTER}"
        )
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    rope.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    others = (
        (config.hidden_act != "silu", f"hidden_act {config.hidden_act}"),
        (getattr(config, "mlp_bias", False), "mlp_bias"),
        (kind != "qwen2" and getattr(config, "attention_bias", False), "attention_bias"),
        (getattr(config, "use_sliding_window", False), "use_sliding_window"),
        (rope["rope_type"] not in _ROPE_SCALINGS, f"rope_type {rope['rope_type']}"),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "partial_rotary_factor"),
    )
    odd = next((what for is_odd, what in others if is_odd), None)
    if odd is not None:
        raise FinetuneError(f"{folder} has {shown(odd)}, which export does not write; convert it with {CONVERTER}")
    return GgufShape(kind, config, rope)


def class_name(kind: str) -> str:
    """Return the name of transformers' class of a kind."""
    return f"{kind.capitalize()}ForCausalLM"
