"""Whole runs of trl's DPOTrainer and ORPOTrainer beside those of `finetune`:
`python -m tests.agent.finetuning.trl_runs FOLDER`.

Both get the same model, new adapters, entries, order and settings, and compute attention by plain operators: the kernel
that a model takes without a mask rounds otherwise. trl reads the entries with its own code. What it is given else: for
DPO batches padded to `finetune`'s buckets, as products of other lengths round otherwise; for ORPO a tokenizer without a
mark of the beginning, which it adds to each prompt, whatever the tokenizer does.
"""

import functools
import json
import random
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import datasets  # type: ignore[import-untyped]
import peft
import torch
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer import dpo_trainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.utils import add_fused_lm_head

from port_agent.finetuning import training
from port_agent.finetuning.inputs.options import Compute, FinetuneOptions
from port_agent.finetuning.text.sequences import BUCKET_TOKENS
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.trained_model import load_model
from tests.agent.finetuning.tiny_model import TEXT, make_model

UPDATES, BATCH, ACCUMULATE, BETA, RATE, LONGEST = 5, 2, 2, 0.1, 1e-2, 128
RANK = 8
TARGETS = ("q_proj", "v_proj")

Entry = dict[str, Any]


def main() -> None:
    """Print what each run came to, as JSON."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    talks, texts = _entries(chats=True), _entries(chats=False)
    found = {
        "dpo, plain operators": _compared(folder / "plain", "dpo", torch.bfloat16, talks, plain=True),
        "dpo": _compared(folder / "usual", "dpo", torch.float32, texts, plain=False),
        "orpo": _compared(folder / "orpo", "orpo", torch.float32, texts, plain=False),
    }
    print(json.dumps(found))


def _compared(folder: Path, loss: str, dtype: torch.dtype, entries: list[Entry], *, plain: bool) -> dict[str, object]:
    """Return the losses of both runs, and the largest difference of their final adapters; `plain`: trl computes
    log-probabilities by plain operators, too.
    """
    model = make_model(folder / "model")
    AutoModelForCausalLM.from_pretrained(model, dtype=dtype).save_pretrained(model)
    (folder / "data.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    options = FinetuneOptions(
        str(model), (str(folder / "data.jsonl"),), str(folder / "out"), sequence_tokens=LONGEST, batch=BATCH,
        accumulate=ACCUMULATE, updates=UPDATES, learning_rate=RATE, held_out=0.0, warm_up=0.0, lora_rank=RANK,
        targets=TARGETS, compute=Compute.STORED, dpo=BETA if loss == "dpo" else None,
        orpo=BETA if loss == "orpo" else None,
    )  # fmt: skip
    ours = list[float]()
    with patch.object(training, "load_model", _eager):
        training.finetune(options, lambda update: ours.append(update.loss), lambda text: None)
    mine = load_file(folder / "out" / "adapter_model.safetensors")
    theirs, others = _of_trl(loss, options, [entries[place] for place in _order(options, len(entries))], plain=plain)
    apart = max((mine[name].float() - others[name].float()).abs().max().item() for name in mine)
    moved = max(value.abs().max().item() for name, value in mine.items() if "lora_B" in name)
    return {"ours": ours, "theirs": theirs, "apart": apart, "moved": moved}


def _entries(*, chats: bool) -> list[Entry]:
    """Return pairs of answers of different lengths, to short texts or to questions of more than a bucket."""
    words, numbers = TEXT.split(), random.Random(3)

    def said(most: int, least: int = 1) -> str:
        return " ".join(numbers.choice(words) for _ in range(numbers.randint(least, most)))

    if not chats:
        return [{"prompt": said(9), "chosen": f" {said(8)}", "rejected": f" {said(8)}"} for _ in range(10)]
    return [
        {
            "prompt": [{"role": "user", "content": said(45, 30)}],
            **{side: [{"role": "assistant", "content": said(8)}] for side in ("chosen", "rejected")},
        }
        for _ in range(10)
    ]


def _order(options: FinetuneOptions, count: int) -> list[int]:
    """Return the entries that `finetune` trains on, one after another."""
    places = list(range(count))
    random.Random(options.seed).shuffle(places)
    found = list[int]()
    for epoch in range(-(-UPDATES * ACCUMULATE * BATCH // count)):
        generator = torch.Generator().manual_seed(options.seed + epoch)
        found += [places[place] for place in torch.randperm(count, generator=generator).tolist()]
    return found[: UPDATES * ACCUMULATE * BATCH]


def _eager(*given: Any) -> Any:
    model = load_model(*given)
    model.set_attn_implementation("eager")
    return model


def _of_trl(
    loss: str, options: FinetuneOptions, entries: list[Entry], *, plain: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of trl's updates, and its adapters."""
    settings: dict[str, Any] = {
        "output_dir": f"{options.out}.trl", "beta": BETA, "per_device_train_batch_size": BATCH, "max_length": LONGEST,
        "gradient_accumulation_steps": ACCUMULATE, "max_steps": UPDATES, "learning_rate": RATE,
        "lr_scheduler_type": "linear", "warmup_steps": 0, "optim": "adamw_torch", "weight_decay": 0.0, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.eos_token
    if loss == "orpo":
        tokenizer.bos_token = None
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", attn_implementation="eager")
    given: dict[str, Any] = {
        "model": model,
        "train_dataset": datasets.Dataset.from_list(entries),
        "processing_class": tokenizer,
        "peft_config": peft.LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS), task_type="CAUSAL_LM"
        ),
    }
    if loss == "orpo":
        trainer: Any = _InOrderOrpo(args=ORPOConfig(**settings), **given)
    else:
        with patch.object(dpo_trainer, "add_fused_lm_head", _add_plain_head if plain else add_fused_lm_head):
            trainer = _InOrderDpo(args=DPOConfig(pad_to_multiple_of=BUCKET_TOKENS, **settings), **given)
    new = load_model(options, Task(TaskKind.CAUSAL_LM), lambda text: None).state_dict()
    trainer.model.load_state_dict({name: value for name, value in new.items() if ".lora_" in name}, strict=False)
    trainer.train()
    shares = trainer.shares
    losses = [sum(shares[first : first + ACCUMULATE]) for first in range(0, len(shares), ACCUMULATE)]
    return losses, peft.get_peft_model_state_dict(trainer.model)


class _InOrder:
    """Of a trainer: takes entries as they come, and keeps the loss of each batch, its share of an update's."""

    train_dataset: Any

    def _get_train_sampler(self, *given: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def training_step(self, *given: Any, **more: Any) -> Any:
        loss = super().training_step(*given, **more)  # type: ignore[misc]
        self.shares = [*getattr(self, "shares", ()), loss.item()]
        return loss


class _InOrderDpo(_InOrder, DPOTrainer):
    pass


class _InOrderOrpo(_InOrder, ORPOTrainer):
    pass


def _add_plain_head(model: Any, **settings: Any) -> None:
    """Have a model return log-probabilities by plain operators, instead of trl's in tiles of the vocabulary."""
    usual = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *given: Any, fused_lm_head: bool = False, labels: Any = None, **more: Any) -> Any:
        logits = usual(*given, **more).logits
        if not fused_lm_head:
            return logits
        following = labels[:, 1:]
        chosen = logits[:, :-1].float().log_softmax(-1).gather(2, following.clamp(min=0)[..., None])[..., 0]
        learned = torch.where(following == -100, 0.0, chosen)
        none = torch.zeros_like(learned)
        return SimpleNamespace(log_probs=learned, entropy=none, mean_logits=none, is_top1=none.bool())

    model.forward = types.MethodType(forward, model)


if __name__ == "__main__":
    main()
