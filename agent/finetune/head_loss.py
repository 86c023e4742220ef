"""The loss of a language model's head and its gradient, some rows of the logits at a time.

Logits are the largest tensors of fine-tuning: 74 MiB for 256 tokens of Qwen2.5 in bfloat16, and the loss as one usually writes it
makes four more of twice that in 32 bits. Rows of a softmax are independent of each other, so those of a few rows are
enough at once, with the same bits: the gradient takes the logits' own memory, and the chosen log-probabilities are added up
in the order of the whole.
"""

import inspect
from typing import Any

import torch
from peft import PeftModel
from torch.nn import functional as F

from agent.finetune.sequences import BUCKET_TOKENS, IGNORED
from agent.follow.products import column_blocks

_BLOCK_BYTES = 8 << 20
"""Of a block of rows in 32 bits; three of them are there at once."""

_LEAST_ROWS = 16
"""In a block: of fewer, kernels may compute in another order."""


def learned_logits(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits, [batch, places, vocabulary], and labels, [batch, places], from the first place on after which a token is learned.

    `tokens` and `labels`: [batch, length], a label for each token, IGNORED where none is learned. In steps of
    BUCKET_TOKENS: each number of rows is a step of its own to whoever plans it.
    """
    length = tokens.shape[1]
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    first = int((following != IGNORED).any(0).int().argmax())
    kept = length - first // BUCKET_TOKENS * BUCKET_TOKENS
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    if "logits_to_keep" in inspect.signature(plain.forward).parameters:
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=kept).logits
    else:
        logits = model(input_ids=tokens, use_cache=False).logits[:, -kept:].contiguous()
    return logits, following[:, -kept:]


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, gradient_of: int | None = None) -> torch.Tensor:
    """Return the sum of the labels' losses, in 32 bits, of logits [..., vocabulary].

    With `gradient_of`, the logits then hold the gradient of that sum divided by it: `logits.backward(logits.detach())`
    goes on with it. Both have the bits of `cross_entropy(logits.float(), labels, reduction="sum")`; the gradient is computed by
    the operators that autograd would call, so the whole step is one forward and one backward pass to whoever follows it.
    """
    memory, labels = logits.detach().view(-1, logits.shape[-1]), labels.reshape(-1)
    chosen = torch.empty(len(labels), 1)
    row_bytes = memory.shape[1] * torch.float32.itemsize
    step = max(_BLOCK_BYTES // row_bytes, _LEAST_ROWS)
    for start, stop in column_blocks(len(labels), min(step, len(labels))):
        learned = labels[start:stop, None].clamp(min=0)
        with torch.no_grad():
            log_probabilities = F.log_softmax(memory[start:stop].float(), dim=-1)
            chosen[start:stop] = log_probabilities.gather(1, learned)
            if gradient_of is not None:
                share = torch.where(labels[start:stop, None] == IGNORED, 0.0, -torch.ones(()) / gradient_of)
                given = torch.zeros_like(log_probabilities).scatter_(1, learned, share)
                memory[start:stop] = torch.ops.aten._log_softmax_backward_data(
                    given, log_probabilities, -1, torch.float32
                )
                del given
        del log_probabilities
    places = torch.where(labels == IGNORED, IGNORED, 0)
    return F.nll_loss(chosen, places, ignore_index=IGNORED, reduction="sum")
