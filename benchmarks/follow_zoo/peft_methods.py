"""Every method of peft on a tiny language model: adapters, prompts, prefixes, tuned scales."""

import importlib.util
import inspect
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from benchmarks.follow_zoo.children import Case
from benchmarks.follow_zoo.compare import SETTINGS, seed
from benchmarks.follow_zoo.inputs import Wanted, batch_for
from benchmarks.follow_zoo.transformers_models import four_steps

_TARGETS = ["q_proj", "v_proj"]
_OPTIONS: dict[str, Any] = {
    "task_type": "CAUSAL_LM",
    "num_virtual_tokens": 4,
    "num_layers": 2,
    "num_attention_heads": 2,  # of key and value, which is what prefixes are made of
    "token_dim": 64,
    "total_step": 8,
    "n_frequency": 50,
    "oft_block_size": 8,
    "boft_block_size": 8,
    "vector_length": 16,
    "num_vectors": 16,
    "feedforward_modules": [],
    "adapter_layers": 1,
    "adapter_len": 4,
    "r": 8,
}


def cases() -> Iterator[Case]:
    """Give one case per method; none where peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        return
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    for kind in sorted(PEFT_TYPE_TO_CONFIG_MAPPING, key=str):
        yield Case(f"peft/{kind.value.lower()}", partial(_train, PEFT_TYPE_TO_CONFIG_MAPPING[kind]), SETTINGS)


def _train(config_class: Any) -> Any:
    from peft import get_peft_model

    warnings.simplefilter("ignore")
    seed()
    known = inspect.signature(config_class).parameters
    options = {name: value for name, value in _OPTIONS.items() if name in known}
    if "target_modules" in known:
        options["target_modules"] = _TARGETS
    base = _language_model()
    model: nn.Module = get_peft_model(base, config_class(**options)).train()
    return four_steps(model, lambda: batch_for(base, Wanted()), config_class.__name__)


def _language_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)
