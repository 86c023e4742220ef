"""The loss of pairs of answers by their odds: ORPO (Hong et al., 2024), which needs no other model to compare with.

The preferred answer is learned with its prompt, and its odds are raised over those of the rejected one. As for DPO, the
formula is computed from log-probabilities of tokens, and its gradient by each of them takes the logits' memory.
"""

import torch
from torch.nn import functional as F

from port_agent.finetuning.accumulation.head_loss import chosen_log_probabilities
from port_agent.finetuning.accumulation.preference_loss import PreferenceLoss
from port_agent.finetuning.text.sequence_file import IGNORED

_LOG_HALF = -0.6931471805599453
"""Border below which log(1 - exp(x)) is computed from exp(x), and above it from exp(x) - 1, as in trl."""

_CERTAIN = -torch.finfo(torch.float32).eps
"""Upper bound of a mean log-probability; above it an answer is certain, and its odds and
their gradient are not finite.
"""


class OddsRatioLoss(PreferenceLoss):
    """The summed loss of pairs, and the gradient of everything trained, adapters or the whole model.

    As in trl, the loss has two terms: the mean over the batch's tokens of the preferred answers and their prompts, and
    `beta` times the odds ratio's. The latter uses the mean log-probability of each answer's tokens.
    """

    def _of_pairs(self, tokens: torch.Tensor, labels: torch.Tensor, gradient_of: int | None) -> torch.Tensor:
        rows, length = tokens.shape
        following = F.pad(tokens[:, 1:], (0, 1)).reshape(-1)
        answers = F.pad(labels[:, 1:], (0, 1), value=IGNORED) != IGNORED
        with torch.set_grad_enabled(gradient_of is not None):
            logits = self._logits(tokens, length)
        chosen = chosen_log_probabilities(logits, following).view(rows, length).requires_grad_()
        with torch.enable_grad():
            loss = self._loss(chosen, answers)
        if gradient_of is not None:
            (given,) = torch.autograd.grad(loss / gradient_of, chosen)
            chosen_log_probabilities(logits, following, given.view(-1, 1))
            logits.backward(logits.detach())
        return loss.detach()

    def _loss(self, chosen: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Return the summed loss from the log-probability of each following token. `answers`: which
        tokens belong to an answer.

        What follows an answer is padding and is not learned.
        """
        pairs = len(chosen) // 2
        read = answers[:pairs].flip(1).cumsum(1).flip(1) > 0  # the prompt and the answer
        imitated = -torch.where(read, chosen[:pairs], 0.0).sum() / read.sum()
        means = torch.where(answers, chosen, 0.0).sum(1) / answers.sum(1)
        preferred, rejected = means.chunk(2)
        log_odds = (preferred - rejected) - (_log_rest(preferred) - _log_rest(rejected))
        return pairs * imitated - self._beta * F.logsigmoid(log_odds).sum()


def _log_rest(log_probabilities: torch.Tensor) -> torch.Tensor:
    """Return log(1 - p) from log(p)."""
    x = log_probabilities.clamp(max=_CERTAIN)
    return torch.where(x < _LOG_HALF, torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))
