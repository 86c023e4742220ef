"""Each kind of model that people fine-tune: within a budget the recipe has the bits of plain PyTorch's loop."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from port_agent import budget
from port_agent.finetuning.accumulation.head_loss import EncoderInput
from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.finetuning.text.sequence_file import IGNORED
from port_agent.finetuning.text.task import TaskKind
from port_agent.finetuning.training import LABELS, finetune
from port_agent.packing import Quantization
from tests.agent.finetuning.tiny_model import TEXT, make_model

KINDS = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral",
    "phi3",
    "smollm3",
    "gpt2",
    "gpt_neox",
    "opt",
    "mamba",
    "phimoe",
)
WITH_ENCODER = ("t5", "bart")


class _PlainLoss:
    """The loss and its gradient as every tutorial has them."""

    def __init__(self, model: Any, head_rows: int | None, kind: TaskKind, *, autocast: bool) -> None:
        self._model, self._kind, self._autocast = model, kind, autocast

    def __call__(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        source: EncoderInput | None = None,
        gradient_of: int | None = None,
    ) -> torch.Tensor:
        following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            if self._kind is TaskKind.MASKED_LM:
                assert source is not None
                logits, following = self._model(input_ids=tokens, attention_mask=source[1]).logits.float(), labels
            elif source is None:
                logits = self._model(input_ids=tokens, use_cache=False).logits.float()
            else:
                read, there = source
                decoded = self._model(input_ids=read, attention_mask=there, decoder_input_ids=tokens, use_cache=False)
                logits = decoded.logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="sum")
        if gradient_of is not None:
            (loss / gradient_of).backward()
        return loss.detach()


def pairs() -> str:
    """Return prompts and completions of many lengths."""
    words = TEXT.split()
    texts = [(" ".join(words[:n]), " ".join(words[n : n + 2])) for n in range(1, 9)]
    return "".join(json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in texts)


VARIANTS: dict[str, tuple[int | None, Quantization | None]] = {
    "lora": (4, None),
    "full": (None, None),
    "nf4": (4, Quantization.NF4),
}
IN_EVERY_VARIANT = ("llama", "gpt2", "t5")
"""Layers of their own: linear ones, transposed ones, an encoder.

The others have adapters alone in each check, all in the long one.
"""


def _cases() -> list[Any]:
    return [
        pytest.param(
            kind,
            *VARIANTS[name],
            id=f"{kind}-{name}",
            marks=() if name == "lora" or kind in IN_EVERY_VARIANT else pytest.mark.long,
        )
        for kind in (*KINDS, *WITH_ENCODER)
        for name in VARIANTS
    ]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.sample(8)
@pytest.mark.parametrize(("kind", "rank", "base"), _cases())
def test_it_has_the_bits_of_plain_pytorch(
    kind: str,
    rank: int | None,
    base: Quantization | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autocast: bool = False,
) -> None:
    make_model(tmp_path / "model", 128 if base else 32, kind)
    data = tmp_path / ("data.jsonl" if kind in WITH_ENCODER else "data.txt")
    data.write_text(pairs() if kind in WITH_ENCODER else TEXT * 8)
    options = FinetuneOptions(
        str(tmp_path / "model"),
        (str(data),),
        str(tmp_path / "mine"),
        lora_rank=rank,
        base=base,
        sequence_tokens=32,
        updates=3,
        batch=2 if kind in WITH_ENCODER else 1,
        held_out=0.0,
        learning_rate=0.01,
        autocast=autocast,
        float32_result=True,
    )
    losses: dict[str, list[float]] = {"mine": [], "plain": []}
    with budget(tensors="300K", page_dir=tmp_path).resizing():
        finetune(options, lambda update: losses["mine"].append(update.loss), lambda note: None)
    monkeypatch.setattr("port_agent.finetuning.training.LearnedLoss", _PlainLoss)
    plain = replace(options, out=str(tmp_path / "plain"))
    finetune(plain, lambda update: losses["plain"].append(update.loss), lambda note: None)
    assert losses["mine"] == losses["plain"] and len(set(losses["mine"])) == 3
    name = "model.safetensors" if rank is None else "adapter_model.safetensors"
    assert (tmp_path / "mine" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("kind", "rank"), [("llama", 4), ("llama", None), ("t5", 4)])
def test_under_autocast_it_has_the_bits_of_plain_pytorch_under_it(
    kind: str, rank: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_it_has_the_bits_of_plain_pytorch(kind, rank, None, tmp_path, monkeypatch, autocast=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rank", "base"), [("bert", 4, None), ("roberta", None, None), ("distilbert", 4, Quantization.NF4)]
)
def test_an_encoder_that_finds_masked_tokens_has_the_bits_of_plain_pytorch(
    kind: str, rank: int | None, base: Quantization | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_it_has_the_bits_of_plain_pytorch(kind, rank, base, tmp_path, monkeypatch)


@pytest.mark.process
@pytest.mark.parametrize(("kind", "rank"), [("distilbert", 4), ("roberta", 4), ("bert", None)])
def test_an_encoder_that_chooses_labels_has_the_bits_of_plain_pytorch(
    kind: str, rank: int | None, tmp_path: Path
) -> None:
    make_model(tmp_path / "model", kind=kind)
    words = TEXT.split()
    texts = [(" ".join(words[n : n + 3 + n % 5]), "ab"[n % 2]) for n in range(12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": t, "label": n}) + "\n" for t, n in texts))
    asked = FinetuneOptions(
        str(tmp_path / "model"),
        (str(tmp_path / "data.jsonl"),),
        str(tmp_path / "mine"),
        lora_rank=rank,
        updates=4,
        batch=3,
        held_out=0.2,
        learning_rate=0.01,
        float32_result=True,
    )
    losses: dict[str, list[float]] = {"mine": [], "plain": []}
    with budget(tensors="100K", page_dir=tmp_path).resizing():
        outcome = finetune(asked, lambda update: losses["mine"].append(update.loss), lambda note: None)
    assert outcome.labels == ("a", "b") and outcome.loss_after is not None
    assert json.loads((tmp_path / "mine" / LABELS).read_text()) == ["a", "b"]
    finetune(
        replace(asked, out=str(tmp_path / "plain")),
        lambda update: losses["plain"].append(update.loss),
        lambda note: None,
    )
    assert losses["mine"] == losses["plain"] and len(set(losses["mine"])) == 4
    name = "model.safetensors" if rank is None else "adapter_model.safetensors"
    assert (tmp_path / "mine" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    loading: Any = AutoModelForSequenceClassification
    if rank is None:
        assert loading.from_pretrained(tmp_path / "mine").config.id2label == {0: "a", 1: "b"}
        return
    base = loading.from_pretrained(tmp_path / "model", num_labels=2, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "mine").state_dict()
    heads = {key: t for key, t in load_file(tmp_path / "mine" / name).items() if "classifier" in key}
    assert heads and all(torch.equal(tensor, loaded[_saved_name(key)]) for key, tensor in heads.items())


def _saved_name(key: str) -> str:
    """Return where peft keeps the trained copy of a layer that is saved whole."""
    head, _, rest = key.removeprefix("base_model.model.").partition("classifier.")
    return f"base_model.model.{head}classifier.modules_to_save.default.{rest}"
