"""An ordinary LoRA script, for `port-agent exec` and for plain Python: `python -m benchmarks.lora_loop FOLDER STEPS`.

A causal language model is loaded from FOLDER (safetensors) as anyone would, peft adds its adapters, AdamW trains them
on sequences of 128 tokens. Nothing in it knows of a budget. It prints one JSON line: losses, CPU and wall seconds of
each step, peak resident memory.
"""

import json
import resource
import sys
import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

TOKENS = 128


def with_adapters(folder: str) -> tuple[Any, torch.optim.Optimizer]:
    """Return the model in `folder` with adapters, and their optimizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    adapted = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    adapted.train()
    return adapted, torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)


def main() -> None:
    """Train; see the module's docstring."""
    folder, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    model, optimizer = with_adapters(folder)
    losses, cpu, wall = [], [], []
    for _ in range(steps):
        begin, began = time.process_time(), time.perf_counter()
        tokens = torch.randint(0, model.config.vocab_size, (1, TOKENS))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        cpu.append(time.process_time() - begin)
        wall.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"losses": losses, "cpu_s": cpu, "wall_s": wall, "peak_mib": peak}))


if __name__ == "__main__":
    main()
