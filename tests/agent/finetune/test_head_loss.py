"""Loss and gradient, some rows at a time, have the bits of the whole; only the rows that matter are computed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from agent.finetune import head_loss
from agent.finetune.head_loss import learned_logits, summed_loss
from agent.finetune.sequences import IGNORED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 16, 40, 97])
def test_loss_and_gradient_have_the_bits_of_the_whole(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "_BLOCK_BYTES", 16 * 1000 * 4)
    torch.manual_seed(rows)
    first = torch.randn(rows, 1000, dtype=dtype) * 4
    labels = torch.randint(0, 1000, (rows,))
    labels[::3] = IGNORED
    labels[0] = 999
    whole = first.clone().requires_grad_()
    expected = F.cross_entropy(whole.float(), labels, reduction="sum")
    (expected / 37).backward()
    logits = (first.clone().requires_grad_() + 0).requires_grad_()
    assert torch.equal(summed_loss(logits, labels), expected.detach()) and torch.equal(logits, first)
    loss = summed_loss(logits, labels, gradient_of=37)
    assert not loss.requires_grad and torch.equal(loss, expected.detach())
    assert whole.grad is not None and torch.equal(logits.detach(), whole.grad)


class Model(nn.Module):
    """What is asked of a language model: logits of each place, the place's number first among them."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.asked: int | None = None
        if keeps:
            self.forward = self._forward_keeping  # type: ignore[method-assign]

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        places = torch.arange(input_ids.shape[1]).float()
        return SimpleNamespace(logits=places[None, :, None].expand(*input_ids.shape, 2))

    def _forward_keeping(self, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> Any:
        self.asked = logits_to_keep
        logits = Model.forward(self, input_ids, use_cache).logits
        return SimpleNamespace(logits=logits[:, -logits_to_keep:].contiguous())


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("first_label", "first_place"), [(1, 0), (32, 0), (33, 32), (70, 64)])
def test_rows_begin_at_the_bucket_of_the_first_learned_token(first_label: int, first_place: int, keeps: bool) -> None:
    tokens = torch.arange(2 * 96).view(2, 96)
    labels = tokens.clone()
    labels[0] = IGNORED
    labels[1, :first_label] = IGNORED
    model = Model(keeps=keeps)
    logits, following = learned_logits(model, tokens, labels)
    assert logits[..., 0].tolist() == [[*range(first_place, 96)]] * 2
    assert model.asked == (96 - first_place if keeps else None)
    expected = F.pad(labels[:, 1:], (0, 1), value=IGNORED)[:, first_place:]
    assert torch.equal(following, expected)
