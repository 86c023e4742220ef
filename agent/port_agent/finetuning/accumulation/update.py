"""An update that reads gradients once or twice: for the norm of all, if it is not known yet, and to
scale and use each of them.

`clip_grad_norm_` reads all gradients, then reads and writes all, and the optimizer reads them again with its state. If
they do not fit into memory, they are moved each time. The total norm is computed from the norm of each gradient. A
gradient scaled right before its use has the same bits as one scaled together with all others.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adam import adam

from port_planner.torch_compat.optimizers import take_state


class ClippedAdamW(torch.optim.AdamW):
    """AdamW after `clip_grad_norm_`, with the bits of both; a step releases the gradients."""

    def __init__(
        self, trained: Iterable[torch.Tensor], learning_rate: float, max_norm: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(trained, lr=learning_rate, weight_decay=weight_decay)
        self._max_norm = max_norm
        self.norms: dict[torch.Tensor, torch.Tensor] = {}
        """Known norms of gradients, until the next step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip the gradients, and update weight by weight. `closure` must be None."""
        (group,) = self.param_groups
        trained = [p for p in group["params"] if p.grad is not None]
        known, self.norms = self.norms, {}
        norms = [known[p] if p in known else torch.linalg.vector_norm(p.grad) for p in trained]
        total = torch.linalg.vector_norm(torch.stack(norms))
        share = torch.clamp(self._max_norm / (total + 1e-6), max=1.0)  # as in clip_grad_norm_
        for p in trained:
            if share.item() != 1.0:
                p.grad.mul_(share)
            self._update_one(group, p)
            p.grad = None

    def _update_one(self, group: dict[str, Any], p: torch.Tensor) -> None:
        weights, gradients, means, squares, largest, steps = (list[torch.Tensor]() for _ in range(6))
        given = (weights, gradients, means, squares, largest, steps)
        has_complex = take_state(self, {**group, "params": [p]}, *given)
        beta1, beta2 = group["betas"]
        adam(
            weights, gradients, means, squares, largest, steps, has_complex=has_complex, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=group["amsgrad"], maximize=group["maximize"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )  # fmt: skip
