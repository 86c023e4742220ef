"""A trained head for all micro-batches of an update: its weight is read once, and its gradient added up in tiles, each written once.

The head is often the largest weight there is, and the table of embeddings, too. One by one, each micro-batch reads it, makes a gradient
as large, one more of the embeddings, and adds both to those before. Here the weight stays while the micro-batches' losses are
computed; of each, the gradient of its logits is kept in tiles of the vocabulary (and paged, where there is no room). At the end each
tile of the weight's gradient is multiplied from them and added up, in the order of the micro-batches, with what came back to the rows
that were looked up. Each sum has the same terms in the same order, and whether products of tiles have the bits of the whole is seen on
this device for each number of rows: where they do not, or a head is more than a product, `TrainedHead.of` and `works_for` say so.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from port_agent.finetuning.accumulation.head_loss import (
    LearnedLoss,
    chosen_log_probabilities,
    learned_places,
    summed_loss,
)
from port_planner.exactness.cancelling import mirrored
from port_planner.exactness.tiles import Operands, tiles_equal

_TILE_BYTES = 8 << 20
"""Of the weight's gradient, about."""

_STEP_ROWS = 64
"""Tiles begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class HeadTile:
    """What a micro-batch leaves for the head's gradient: rows that it ran on, [rows, width], and the gradient of their logits in tiles."""

    rows: torch.Tensor
    given: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What comes back to the rows of the table that a micro-batch looked up: which, in order, and their gradients, [rows, width]."""

    places: torch.Tensor
    gradients: torch.Tensor


class TrainedHead:
    """A head that is a product alone, with a weight that is trained."""

    def __init__(self, head: nn.Linear, embedding: nn.Embedding | None) -> None:
        """`embedding`: the table that shares the head's weight; None where none does."""
        self._head, self._embedding = head, embedding
        self._equal: dict[int, bool] = {}
        """By the number of rows: whether tiles have the bits of the whole."""

    @classmethod
    def of(cls, model: Any, loss: LearnedLoss, tokens: torch.Tensor) -> "TrainedHead | None":
        """Return a model's head; None where it is another, or looked up otherwise. Seen by a pass of the first of some tokens."""
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if type(head) is not nn.Linear or head.bias is not None or not head.weight.requires_grad:
            return None
        tied = embedding.weight is head.weight
        if tied and (
            type(embedding) is not nn.Embedding
            or embedding.max_norm is not None
            or embedding.scale_grad_by_freq
            or embedding.sparse
        ):
            return None
        return cls(head, embedding if tied else None) if loss.is_product(tokens) else None

    @property
    def weight(self) -> torch.Tensor:
        """What is trained, [vocabulary, width]."""
        return self._head.weight

    @property
    def tied(self) -> bool:
        """Whether the weight is the table of embeddings, too."""
        return self._embedding is not None

    def works_for(self, rows: int) -> bool:
        """Return whether tiles of this many rows' product have the bits of the whole on this device; compared where none came yet."""
        if rows not in self._equal:
            self._equal[rows] = self._tiles_have_bits_of_whole(rows)
        return self._equal[rows]

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, gradient_of: int) -> tuple[float, HeadTile]:
        """Return a micro-batch's loss, and what it leaves; the gradient goes back through `hidden`, [batch, length, width]."""
        kept, following = learned_places(labels)
        block = hidden[:, -kept:]
        given = block.detach().requires_grad_()
        logits = F.linear(given, self._head.weight.detach())
        chosen = chosen_log_probabilities(logits, following, gradient_of)
        logits.backward(logits.detach())
        block.backward(given.grad)
        flat = logits.detach().view(-1, logits.shape[-1])
        part = HeadTile(
            given.detach().reshape(-1, given.shape[-1]), [flat[:, start:stop].clone() for start, stop in self._tiles()]
        )
        return summed_loss(chosen, following).item(), part

    def looked_up(self, tokens: torch.Tensor, gradient: torch.Tensor) -> LookedUp:
        """Return what comes back to the table, where `gradient`, [batch, length, width], is of what was looked up of it."""
        places, inverse = tokens.unique(return_inverse=True)
        padding = None if self._embedding is None else self._embedding.padding_idx
        unlearned = (places == padding).nonzero() if padding is not None else places[:0]
        added = torch.ops.aten.embedding_dense_backward(
            gradient, inverse, len(places), int(unlearned[0]) if len(unlearned) else -1, False
        )
        return LookedUp(places, added)

    def add_gradients(self, parts: Sequence[HeadTile], looked_up: Sequence[LookedUp]) -> None:
        """Add the gradients of all micro-batches to the weight's; of a tied one, `looked_up` of each."""
        weight = self._head.weight
        first = weight.grad is None
        if weight.grad is None:
            weight.grad = torch.empty_like(weight)
        gradient = weight.grad
        with torch.no_grad():
            for number, (start, stop) in enumerate(self._tiles()):
                tile = gradient[start:stop]
                for batch, part in enumerate(parts):
                    added = part.given[number].t().mm(part.rows)
                    part.given[number] = part.given[number][:0]
                    if looked_up:
                        _add_rows(added, looked_up[batch], start, stop)
                    if first and batch == 0:
                        tile.copy_(added)
                    else:
                        tile += added

    def _tiles(self) -> Iterator[tuple[int, int]]:
        """Yield where the tiles of the vocabulary begin and end."""
        outputs = self._head.weight.shape[0]
        return itertools.pairwise((*range(0, outputs, self._step), outputs))

    @property
    def _step(self) -> int:
        row_bytes = self._head.weight[0].nbytes
        return max(_TILE_BYTES // row_bytes // _STEP_ROWS, 1) * _STEP_ROWS

    def _tiles_have_bits_of_whole(self, rows: int) -> bool:
        """Return whether products in tiles have the bits of what autograd multiplies: of numbers whose sums cancel, of two tiles and the last."""
        weight, step = self._head.weight, self._step
        outputs = min(weight.shape[0], 2 * step + weight.shape[0] % step)
        drawn = Operands(weight.dtype)
        hidden = mirrored(drawn.numbers(1, rows, weight.shape[1]), 1, -1)
        trained = drawn.numbers(outputs, weight.shape[1])
        given = mirrored(drawn.numbers(1, rows, outputs), 1, 1)
        logits = F.linear(hidden, trained.requires_grad_())
        (whole,) = torch.autograd.grad(logits, trained, given)
        del logits
        bounds = itertools.pairwise((*range(0, outputs, step), outputs))
        return tiles_equal(whole, ((a, b, given[0, :, a:b].clone().t().mm(hidden[0])) for a, b in bounds))


def _add_rows(added: torch.Tensor, looked_up: LookedUp, start: int, stop: int) -> None:
    """Add to a tile what was looked up of it, as a sum with a whole table of zeros but for those rows would."""
    added += 0.0  # -0.0 + 0.0 is 0.0
    bounds = torch.tensor((start, stop), dtype=looked_up.places.dtype)
    first, last = torch.searchsorted(looked_up.places, bounds).tolist()
    if first < last:
        places = looked_up.places[first:last] - start
        added[places] = added[places] + looked_up.gradients[first:last]
