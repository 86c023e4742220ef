"""What `benchmarks.gpu` trains: GPT-2 medium, ResNet-50 on 64 images, LoRA on 1.1 billion frozen weights;
and torch's own ways to fit.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.device_steps import Context, Job
from benchmarks.fit import checkpoint_blocks
from benchmarks.models import Workload, workload

TOKENS = 128


def gpu_jobs(*, small: bool) -> tuple[Job, ...]:
    """Return the jobs, or `small` ones of the same kinds."""
    return (
        Job("gpt2 medium", partial(_gpt2_medium, small=small), "adamw"),
        Job("resnet50 b64", partial(workload, "resnet50", small=small, batch_size=None if small else 64), "sgd"),
        Job("lora 1.1b", partial(_lora, small=small), "adamw"),
    )


def _gpt2_medium(*, small: bool) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    if small:
        return workload("gpt2", small=True)
    torch.manual_seed(0)
    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16)
    return replace(
        workload("gpt2", small=True), model=GPT2LMHeadModel(config), batch=partial(_tokens, config.vocab_size)
    )


def _lora(*, small: bool) -> Workload:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = (64, 192, 2, 4, 2, 1000) if small else (2048, 5632, 22, 32, 4, 32000)
    width, inner, layers, heads, shared, words = sizes
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        vocab_size=words,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    if not small:
        model = model.to(torch.bfloat16)
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, adapters)
    return Workload(adapted.train(), lambda model, ids: model(input_ids=ids, labels=ids).loss, partial(_tokens, words))


def _tokens(words: int, i: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, words, (1, TOKENS), generator=torch.Generator().manual_seed(1000 + i)),)


@dataclass(frozen=True, slots=True)
class Method:
    """One of torch's own ways to take less of a device's memory: what a forward pass runs in, and what
    becomes of the model first.
    """

    name: str
    around: Context = contextlib.nullcontext
    adapt: Callable[[Workload], Workload] = lambda made: made


def _checkpointed(made: Workload) -> Workload:
    checkpoint_blocks(made.model)
    return made


def _compiled(made: Workload) -> Workload:
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = 0.5
    compiled = torch.compile(made.model)
    return replace(made, loss_fn=lambda _, *batch: made.loss_fn(compiled, *batch))


METHODS = (
    Method("eager"),
    Method("save_on_cpu", torch.autograd.graph.save_on_cpu),
    Method("checkpoint", adapt=_checkpointed),
    Method("memory budget 0.5", adapt=_compiled),
)
