"""Language models of several kinds, small and ready to be trained."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.agent.finetuning.tiny_model import shape_of

VOCABULARY = 97


def model_of(kind: str, *, adapted: bool, width: int = 32, **settings: Any) -> Any:
    """Return a small model in training mode, all of it trained or adapters that are not zero."""
    torch.manual_seed(0)
    without = {} if kind != "gpt2" else dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = AutoConfig.for_model(**{**shape_of(kind, width), **without, "vocab_size": VOCABULARY, **settings})
    model = AutoModelForCausalLM.from_config(config)
    if not adapted:
        return model.train()
    model = model.to(torch.bfloat16)
    targets = {"gpt_neox": ["query_key_value"], "gpt2": ["c_attn"], "phi3": ["qkv_proj", "down_proj"]}
    lora = LoraConfig(r=2, target_modules=targets.get(kind, ["q_proj", "down_proj"]), init_lora_weights=False)
    return get_peft_model(model, lora).train()
