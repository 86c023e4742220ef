"""The loss of pairs of answers of which one is preferred: DPO (Rafailov et al., 2023), relative to the model without
its adapters.

The log-probabilities of each answer are summed first; the gradient of the loss by these two sums is then the gradient
of each of their tokens. So the loss takes the logits' own memory and a few rows in 32 bits, with the bits of autograd
through `log_softmax`, `gather` and `sum`.
"""

from typing import Any

import torch
from torch.nn import functional as F

from port_agent.finetuning.accumulation.head_loss import (
    Beside,
    LearnedLoss,
    chosen_log_probabilities,
    forward_pass,
    learned_places,
)
from port_agent.finetuning.text.sequence_file import IGNORED


class PreferenceLoss:
    """The summed loss of pairs, and the gradient of everything trained.

    `beta`: how far the model may move from the model without adapters.
    """

    def __init__(self, model: Any, beta: float, *, autocast: bool = False) -> None:
        """Use a model with adapters."""
        self._model, self._beta, self._autocast = model, beta, autocast
        self._of_tokens = LearnedLoss(model, autocast=autocast)

    def __call__(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        source: Beside = None,
        gradient_of: int | None = None,
    ) -> torch.Tensor:
        """Return the sum of the pairs' losses in 32 bits.

        `tokens` and `labels`: [2 * pairs, length], the preferred answers and then the rejected ones; `source`: None.
        With `gradient_of`, the gradients of the sum divided by it are added to those of the parameters. Dropout is off,
        as in trl.
        """
        training = self._model.training
        self._model.eval()  # no dropout: the loss compares two models
        try:
            return self._of_pairs(tokens, labels, gradient_of)
        finally:
            self._model.train(training)

    def _of_pairs(self, tokens: torch.Tensor, labels: torch.Tensor, gradient_of: int | None) -> torch.Tensor:
        kept, following = learned_places(labels)
        with torch.no_grad(), self._model.disable_adapter():
            reference = self._summed(self._logits(tokens, kept), following, tokens.shape[1])
        with torch.set_grad_enabled(gradient_of is not None):
            logits = self._logits(tokens, kept)
        summed = self._summed(logits, following, tokens.shape[1]).requires_grad_()
        with torch.enable_grad():
            preferred, rejected = (summed - reference).chunk(2)
            losses = -F.logsigmoid(self._beta * (preferred - rejected))
            loss = losses.sum()
        if gradient_of is not None:
            (given,) = torch.autograd.grad(loss / gradient_of, summed)
            rows = given.repeat_interleave(kept)[:, None]
            chosen_log_probabilities(logits, following, rows)
            logits.backward(logits.detach())
        return loss.detach()

    def _logits(self, tokens: torch.Tensor, kept: int) -> torch.Tensor:
        """Return logits of the last places, [rows, kept, vocabulary]."""
        with forward_pass(tokens.device.type, autocast=self._autocast):
            logits: torch.Tensor = self._model(input_ids=tokens, use_cache=False).logits
        return logits[:, -kept:].contiguous() if kept < logits.shape[1] else logits

    def _summed(self, logits: torch.Tensor, following: torch.Tensor, length: int) -> torch.Tensor:
        """Return the log-probability of each answer, [rows].

        It is summed over all places of `length` that another place follows, as in trl. The order of a sum decides its last bit, which must
        not depend on where the other answers of the batch begin.
        """
        chosen = chosen_log_probabilities(logits, following)
        learned = torch.where(following[:, None] == IGNORED, 0.0, chosen).view(len(logits), -1)
        return F.pad(learned, (length - learned.shape[1], -1)).sum(1)

    def may_run_in_blocks(self, tokens: torch.Tensor) -> bool:
        """Return False: the gradient of a row depends on all rows."""
        return False

    def rows_at_once(self, rows: int, at_once: int | None = None) -> int:
        """Return the number of rows whose logits exist at the same time, which is all."""
        return rows

    def bytes_at_once(self, rows: int, at_once: int | None = None) -> int:
        """Return the peak bytes of the loss of `rows` rows."""
        return self._of_tokens.bytes_at_once(rows)
