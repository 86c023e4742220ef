"""A trained head for all micro-batches of an update: its weight is read once, and its gradient is summed in tiles that
are each written once.

The head is often the largest weight, and often also the table of embeddings. Run one at a time, each micro-batch reads
it, makes a gradient as large, another one of the embeddings, and adds both to the previous ones. Here the weight stays
resident while the micro-batches' losses are computed. The gradient of each one's logits is kept in tiles of the
vocabulary, which are paged if they do not fit. At the end, each tile of the weight's gradient is computed from them.
They are summed in the order of the micro-batches, with the gradients of the rows that were looked up.

Each sum has the same terms in the same order. Whether products of tiles have the bits of the whole is tested
on this device for each number of rows. If they do not, or if a head is more than a product, `TrainedHead.of`
and `works_for` report it.
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
"""Approximate bytes of a tile of the weight's gradient."""

_STEP_ROWS = 64
"""Tiles begin at multiples of this number of rows."""


@dataclass(frozen=True, slots=True)
class HeadTile:
    """The contribution of a micro-batch to the head's gradient: its rows, [rows, width], and the gradient
    of their logits in tiles.
    """

    rows: torch.Tensor
    given: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The gradients of the table's rows that a micro-batch looked up: their indices in order, and the
    gradients, [rows, width].
    """

    places: torch.Tensor
    gradients: torch.Tensor


class TrainedHead:
    """A head that is only a product, with a trained weight."""

    def __init__(self, head: nn.Linear, embedding: nn.Embedding | None) -> None:
        """`embedding`: the table that shares the head's weight, or None."""
        self._head, self._embedding = head, embedding
        self._equal: dict[int, bool] = {}
        """Whether tiles have the bits of the whole, by the number of rows."""

    @classmethod
    def of(cls, model: Any, loss: LearnedLoss, tokens: torch.Tensor) -> "TrainedHead | None":
        """Return a model's head; None if it is not only a product, or is looked up in another way.

        Tested by a pass over the first of some tokens.
        """
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
        """The trained weight, [vocabulary, width]."""
        return self._head.weight

    @property
    def tied(self) -> bool:
        """Whether the weight is also the table of embeddings."""
        return self._embedding is not None

    def works_for(self, rows: int) -> bool:
        """Return whether tiles of a product with this many rows have the bits of the whole on this device.

        Compared once per number of rows.
        """
        if rows not in self._equal:
            self._equal[rows] = self._tiles_have_bits_of_whole(rows)
        return self._equal[rows]

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, gradient_of: int) -> tuple[float, HeadTile]:
        """Return a micro-batch's loss, and its contribution to the head's gradient; the gradient continues through
        `hidden`, [batch, length, width].
        """
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
        """Return the gradients for the table from those of the looked-up rows, [batch, length, width]."""
        places, inverse = tokens.unique(return_inverse=True)
        padding = None if self._embedding is None else self._embedding.padding_idx
        unlearned = (places == padding).nonzero() if padding is not None else places[:0]
        added = torch.ops.aten.embedding_dense_backward(
            gradient, inverse, len(places), int(unlearned[0]) if len(unlearned) else -1, False
        )
        return LookedUp(places, added)

    def add_gradients(self, parts: Sequence[HeadTile], looked_up: Sequence[LookedUp]) -> None:
        """Add the gradients of all micro-batches to the weight's, including `looked_up` of each for a tied weight."""
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
        """Return whether tiled products have the bits of autograd's product, for numbers whose sums cancel.

        Tested in two tiles and the last one.
        """
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
    """Add the looked-up gradients to a tile, with the bits of adding a whole table that is zero in the other rows."""
    added += 0.0  # -0.0 + 0.0 is 0.0
    bounds = torch.tensor((start, stop), dtype=looked_up.places.dtype)
    first, last = torch.searchsorted(looked_up.places, bounds).tolist()
    if first < last:
        places = looked_up.places[first:last] - start
        added[places] = added[places] + looked_up.gradients[first:last]
