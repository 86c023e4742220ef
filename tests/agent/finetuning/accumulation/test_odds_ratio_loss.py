"""Pairs of answers have the loss and the gradients of ORPO as it is usually written, to the bit, and those of trl."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from port_agent.finetuning.accumulation import head_loss
from port_agent.finetuning.accumulation.odds_ratio_loss import OddsRatioLoss
from port_agent.finetuning.text.sequence_file import IGNORED
from tests.agent.finetuning.accumulation.small_models import VOCABULARY, model_of

BETA, PAIRS, LENGTH = 0.1, 2, 70
ANSWERS = ((40, 70), (35, 50), (40, 52), (35, 69))
"""Where the preferred and then the rejected answers begin and end; what follows is padding."""


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, [2 * PAIRS, LENGTH]."""
    tokens = torch.randint(0, VOCABULARY, (2 * PAIRS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = torch.full_like(tokens, IGNORED)
    for row, (begin, end) in enumerate(ANSWERS):
        labels[row, begin:end] = tokens[row, begin:end]
    return tokens, labels


def plain_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the summed loss as one usually writes it."""
    logits = model(input_ids=tokens, use_cache=False).logits
    following = F.pad(tokens[:, 1:], (0, 1))
    log_probabilities = torch.gather(logits.float().log_softmax(-1), 2, following[..., None])[..., 0]
    places = torch.arange(LENGTH) + 1
    begins, ends = torch.tensor(ANSWERS).T[..., None]
    answers, read = (places >= begins) & (places < ends), (places < ends)[:PAIRS]
    imitated = -torch.where(read, log_probabilities[:PAIRS], 0.0).sum() / read.sum()
    means = torch.where(answers, log_probabilities, 0.0).sum(1) / answers.sum(1)
    rest = torch.where(means < -0.6931471805599453, torch.log1p(-means.exp()), torch.log(-means.expm1()))
    (preferred, rejected), (rest_of_preferred, rest_of_rejected) = means.chunk(2), rest.chunk(2)
    log_odds = (preferred - rejected) - (rest_of_preferred - rest_of_rejected)
    return PAIRS * imitated - BETA * F.logsigmoid(log_odds).sum()


def gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("kind", "adapted"), [("llama", True), ("llama", False), ("gpt2", True), ("gemma2", True)])
def test_loss_and_gradients_have_the_bits_of_autograd_through_all(
    kind: str, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "_BLOCK_BYTES", 16 * VOCABULARY * 4)
    model = model_of(kind, adapted=adapted)
    plain = copy.deepcopy(model)
    tokens, labels = pairs()
    expected = plain_loss(plain, tokens)
    (expected / 7).backward()
    loss = OddsRatioLoss(model, BETA)
    assert torch.equal(loss(tokens, labels), expected.detach()) and not gradients(model)
    assert torch.equal(loss(tokens, labels, gradient_of=7), expected.detach())
    mine, theirs = gradients(model), gradients(plain)
    assert len(mine) == len(theirs) > 0 and all(map(torch.equal, mine, theirs))


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_trl() -> None:
    """Its trainer's own computation, on a batch of its own format; it computes the softmax twice."""
    orpo = pytest.importorskip("trl.experimental.orpo")
    model = model_of("llama", adapted=False)
    theirs = copy.deepcopy(model)
    tokens, labels = pairs()
    there = torch.arange(LENGTH) < torch.tensor(ANSWERS)[:, 1:]
    batch = {
        f"{side}_{name}": value
        for name, whole in (("input_ids", tokens), ("attention_mask", there.long()), ("labels", labels))
        for side, value in zip(("chosen", "rejected"), whole.chunk(2), strict=True)
    }
    trainer = object.__new__(orpo.ORPOTrainer)
    alone = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda value: value)
    vars(trainer).update(
        accelerator=alone, beta=BETA, is_encoder_decoder=False, padding_value=0, aux_loss_enabled=False
    )
    expected, _ = trainer.get_batch_loss_metrics(theirs, batch)
    expected.backward()
    torch.testing.assert_close(OddsRatioLoss(model, BETA)(tokens, labels, gradient_of=PAIRS) / PAIRS, expected.detach())
    for mine, its in zip(gradients(model), gradients(theirs), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


def test_nothing_is_dropped_at_random_and_the_model_trains_on_as_before() -> None:
    model = model_of("gpt2", adapted=True, attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5)
    loss = OddsRatioLoss(model, BETA)
    assert torch.equal(loss(*pairs()), loss(*pairs())) and model.training


def test_an_answer_that_is_certain_has_finite_gradients() -> None:
    model = model_of("llama", adapted=False)
    head = model.get_output_embeddings()
    tokens, labels = (torch.full((2, 40), 5), torch.full((2, 40), IGNORED))
    labels[:, 30:] = 5
    with torch.no_grad():  # every place says 5, whatever was read
        model.model.norm.weight.zero_()
        head.bias = torch.nn.Parameter(torch.full((VOCABULARY,), -50.0))
        head.bias[5] = 50.0
    loss = OddsRatioLoss(model, BETA)(tokens, labels, gradient_of=1)
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients(model))
