"""Models of the kinds that are exported, as small as their tokenizers allow."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from tests.agent.finetuning.tiny_model import make_model

VOCABULARY = 320
"""Of the models: some more than of the tokenizer."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _split(digits: str) -> dict[str, Any]:
    pattern = {"Regex": _WORDS % digits}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES]}


SPLITTINGS: dict[str, dict[str, Any]] = {
    "gpt-2": {},
    "smollm": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True},
    ]}},
    "llama-bpe": {"pre_tokenizer": _split("{1,3}"), "model": {"ignore_merges": True}},
    "qwen2": {"pre_tokenizer": _split(""), "normalizer": {"type": "NFC"}},
}  # fmt: skip
"""What differs from a tokenizer of GPT-2, by llama.cpp's name of it, as the models' own tokenizer.json has it."""


def resplit(written: dict[str, Any], splitting: str) -> dict[str, Any]:
    """Return a tokenizer.json that splits text in another way."""
    changed = copy.deepcopy(written)
    for name, value in SPLITTINGS[splitting].items():
        changed[name] = {**changed[name], **value} if name == "model" else value
    return changed


def make_exported(folder: Path, kind: str, splitting: str = "gpt-2", **settings: Any) -> Path:
    """Write a model with random weights in bfloat16 and a tokenizer to a directory, and return it."""
    make_model(folder, 64, vocabulary=VOCABULARY)
    path = folder / "tokenizer.json"
    changed = resplit(json.loads(path.read_text()), splitting)
    path.write_text(Tokenizer.from_str(json.dumps(changed)).to_str())
    torch.manual_seed(1)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": kind == "qwen3",
        "bos_token_id": 0, "eos_token_id": 1, **({"head_dim": 32} if kind == "qwen3" else {}), **settings,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.3)
    model.save_pretrained(folder)
    return folder
