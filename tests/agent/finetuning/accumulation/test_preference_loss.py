"""Pairs of answers have the loss and the gradients of DPO as it is usually written, to the bit."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from port_agent.finetuning.accumulation import head_loss
from port_agent.finetuning.accumulation.preference_loss import PreferenceLoss
from port_agent.finetuning.text.sequence_file import IGNORED
from tests.agent.finetuning.accumulation.small_models import VOCABULARY, model_of

BETA, PAIRS, LENGTH = 0.1, 2, 70


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, [2 * PAIRS, LENGTH], of answers of different lengths behind their prompts."""
    tokens = torch.randint(0, VOCABULARY, (2 * PAIRS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = torch.full_like(tokens, IGNORED)
    for row, (begin, end) in enumerate(((40, 70), (35, 50), (40, 52), (35, 69))):
        labels[row, begin:end] = tokens[row, begin:end]
    return tokens, labels


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each answer as one usually writes it."""
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)[:, -logits.shape[1] :]
    chosen = torch.gather(logits.float().log_softmax(-1), 2, following.clamp(min=0)[..., None])[..., 0]
    return torch.where(following == IGNORED, 0.0, chosen).sum(1)


def gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_loss_and_gradients_have_the_bits_of_autograd_through_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "_BLOCK_BYTES", 16 * VOCABULARY * 4)
    model = model_of(kind, adapted=True)
    plain = copy.deepcopy(model)
    tokens, labels = pairs()
    kept = LENGTH - 32  # from the bucket of the first answer on
    with torch.no_grad(), plain.disable_adapter():
        reference = summed(plain(input_ids=tokens, use_cache=False).logits[:, -kept:], labels)
    ratios = summed(plain(input_ids=tokens, use_cache=False).logits[:, -kept:], labels) - reference
    preferred, rejected = ratios.chunk(2)
    expected = -F.logsigmoid(BETA * (preferred - rejected)).sum()
    (expected / 7).backward()
    loss = PreferenceLoss(model, BETA)
    assert torch.equal(loss(tokens, labels), expected.detach()) and not gradients(model)
    assert torch.equal(loss(tokens, labels, gradient_of=7), expected.detach())
    mine, theirs = gradients(model), gradients(plain)
    assert len(mine) == len(theirs) > 0 and all(map(torch.equal, mine, theirs))


def test_nothing_is_dropped_at_random_and_the_model_trains_on_as_before() -> None:
    model = model_of("gpt2", adapted=True, attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5)
    loss = PreferenceLoss(model, BETA)
    assert torch.equal(loss(*pairs()), loss(*pairs())) and model.training


def test_a_model_as_it_was_without_adapters_prefers_neither() -> None:
    model = model_of("llama", adapted=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(parameter)
    torch.testing.assert_close(PreferenceLoss(model, BETA)(*pairs()), PAIRS * torch.log(torch.tensor(2.0)))


@pytest.mark.process
@pytest.mark.slow
def test_whole_runs_have_the_losses_and_weights_of_trl(tmp_path: Path) -> None:
    """To the bit, in 16 bits, where trl's trainer computes log-probabilities by plain operators. As it is it does so
    in tiles of the vocabulary, and for ORPO it computes each softmax twice, so that sums are rounded otherwise.
    """
    pytest.importorskip("trl")
    words = [sys.executable, "-m", "tests.agent.finetuning.trl_runs", str(tmp_path)]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    plain = found.pop("dpo, plain operators")
    assert plain["ours"] == plain["theirs"] and plain["apart"] == 0 < plain["moved"]
    for run in found.values():
        assert run["ours"] == pytest.approx(run["theirs"], rel=1e-5) and run["apart"] < 1e-3 * run["moved"]
