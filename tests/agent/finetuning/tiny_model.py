"""A language model's directory as people have it, so small that it is made in a moment."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerFast,
)

from port_agent.finetuning.text.shapes import Message

ENCODERS = ("bert", "roberta", "distilbert")
TEXT = "to be or not to be that is the question whether tis nobler in the mind to suffer\n"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
THOUGHTS = TEMPLATE.replace(
    "{{ m['content'] }}", "{% if m['role'] == 'assistant' and loop.last %}the mind {% endif %}{{ m['content'] }}"
)
"""As Qwen3's: an answer has thoughts before it, which are left away once the conversation goes on."""

TALK = (
    Message("user", "to be or"),
    Message("assistant", "not to be"),
    Message("user", "that is"),
    Message("assistant", "the question"),
)
"""What somebody asks and is answered, twice."""


def shape_of(kind: str, hidden_size: int = 32) -> dict[str, Any]:
    """Return the configuration of a small model of one of transformers' kinds."""
    if kind == "gpt2":
        return {"model_type": kind, "n_embd": hidden_size, "n_layer": 2, "n_head": 2, "n_positions": 128}
    with_encoder = {"model_type": kind, "d_model": hidden_size, "decoder_start_token_id": 1, "pad_token_id": 0}
    if kind == "t5":
        return {**with_encoder, "d_kv": hidden_size // 2, "d_ff": 2 * hidden_size, "num_layers": 2, "num_heads": 2}
    if kind == "bart":
        heads = dict.fromkeys(
            ("encoder_attention_heads", "decoder_attention_heads", "encoder_layers", "decoder_layers"), 2
        )
        widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2 * hidden_size)
        return {**with_encoder, **heads, **widths, "max_position_embeddings": 128}
    if kind == "distilbert":
        return {"model_type": kind, "dim": hidden_size, "hidden_dim": 2 * hidden_size, "n_layers": 2, "n_heads": 2}
    if kind == "mamba":
        return {"model_type": kind, "hidden_size": hidden_size, "state_size": 8, "num_hidden_layers": 2}
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    return {
        "model_type": kind,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        **(experts if kind == "phimoe" else {}),
        **({"ffn_dim": 2 * hidden_size, "word_embed_proj_dim": hidden_size} if kind == "opt" else {}),
        **({"head_dim": hidden_size // 2} if kind in ("qwen3", "gemma2", "gemma3_text") else {}),
    }


def make_model(folder: Path, hidden_size: int = 32, kind: str = "llama", vocabulary: int | None = None) -> Path:
    """Write configuration, weights and tokenizer to `folder` and return it; `vocabulary`: of the model,
    None for the tokenizer's.
    """
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<mask>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", mask_token="<mask>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = AutoConfig.for_model(vocab_size=vocabulary or len(tokenizer), **shape_of(kind, hidden_size))
    made: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if kind in ENCODERS:
        made = AutoModelForMaskedLM
    made.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_data(path: Path) -> Path:
    """Write a record of each kind, several times, and two broken lines; return the path."""
    records = [
        {"text": TEXT},
        {"prompt": "to be or", "completion": " not to be"},
        {
            "messages": [
                {"role": "user", "content": "to be or"},
                {"role": "assistant", "content": "that is the question"},
            ]
        },
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records * 4) + "{broken\n[1]\n")
    return path
