"""How a frozen head's product runs on some rows at a time with the bits of all rows at once.

The logits of all rows, together with the product's temporary memory, are the peak of a step. Rows of a product are
independent of each other, but kernels may add terms in a different order if there are fewer rows. This is tested on
this device, forward and backward, for each number of rows before the head first runs on it. The test uses numbers
whose sums cancel, the head's width and data type, and as many of its outputs as fit into `_COMPARED_BYTES`. Blocks
whose bits differ are not used. A cap or a scale after the product may follow only if it works elementwise, which is
tested, too (`works_by_element`).
"""

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from port_agent.finetuning.inputs.options import FinetuneError
from port_planner.base.tensor_bytes import same_bits
from port_planner.exactness.cancelling import RESIDUE, mirrored
from port_planner.exactness.kept_answers import KeptAnswers
from port_planner.exactness.tiles import Operands, tiles_equal

MIN_ROWS = 16
"""Fewest rows in a block.

With fewer, products use special kernels, and reading the weight takes longer than multiplying by it.
"""

AT_ONCE = (128, 64, 32, MIN_ROWS)
"""Numbers of rows that are tried, the largest first, because each block reads the whole weight."""

_COMPARED_BYTES = 24 << 20
"""Approximate bytes that a comparison takes."""

_MIN_OUTPUTS, _STEP_OUTPUTS = 1024, 64
"""Fewest outputs of the head that are compared, and the number of which they are a multiple, so that no kernel's last
columns lie inside the whole.
"""


_ELEMENTS, _FEW_ELEMENTS = 331, 5
"""Elements used to test the function after a product: many at once, and fewer than one vector; not multiples of any
kernel's vector length.
"""

_ELEMENTS_SPREAD = 16.0
"""Standard deviation of the tested elements: caps are 20 to 50."""


def works_by_element(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether a function gives an element, [1, 1, elements], and its gradient the same bits regardless of
    the surrounding elements.

    A kernel may compute the last elements of a row by different code than those that fill its vectors.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(1, 1, _ELEMENTS, generator=generator) * _ELEMENTS_SPREAD

    def with_gradient(elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = elements.to(dtype, copy=True).requires_grad_()
        with torch.enable_grad():
            made = function(given)
        (gradient,) = torch.autograd.grad(made, given, made.detach())
        return made.detach(), gradient

    whole = with_gradient(drawn)
    parts = [with_gradient(part) for part in drawn.split(_FEW_ELEMENTS, dim=-1)]
    return all(
        same_bits(of, torch.cat(found, dim=-1)) for of, found in zip(whole, zip(*parts, strict=True), strict=True)
    )


def head_row_blocks(rows: int, at_once: int) -> list[tuple[int, int]]:
    """Return where blocks of rows begin and end; a remainder of fewer than MIN_ROWS joins the last block."""
    starts = list(range(0, rows, at_once))
    if len(starts) > 1 and rows - starts[-1] < MIN_ROWS:
        starts.pop()
    return list(itertools.pairwise((*starts, rows)))


class HeadRows:
    """The number of rows on which a head runs at a time: at most `most`, or fewer if only that
    gives the bits of all at once.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, most: int) -> None:
        """`weight`: [outputs, width], of which only shape and data type count; `bias`: whether there is one."""
        (self._outputs, self._width), self._dtype, self._biased = weight.shape, weight.dtype, bias is not None
        self.most, self._comparisons = most, KeptAnswers()
        self._blocks: dict[int, list[tuple[int, int]]] = {}
        """Beginnings and ends of blocks of rows, by the total number of rows."""

    def blocks(self, rows: int) -> list[tuple[int, int]]:
        """Return where blocks of rows begin and end, after a comparison if this number of rows is new.

        Raises FinetuneError.
        """
        if rows not in self._blocks:
            self._blocks[rows] = self._compared(rows)
        return self._blocks[rows]

    def _compared(self, rows: int) -> list[tuple[int, int]]:
        if rows <= self.most:
            return [(0, rows)]
        tried = [at_once for at_once in AT_ONCE if at_once <= self.most]
        for at_once in tried:
            blocks = head_row_blocks(rows, at_once)
            form = "head_rows", self._outputs, self._width, self._dtype, self._biased, tuple(blocks)
            if self._comparisons.equal(form, partial(self._has_bits_of_whole, blocks)):
                return blocks
        raise FinetuneError(
            f"the head's product of {rows} rows has different bits in blocks of {' or '.join(map(str, tried))} rows "
            "on this device, and the budget cannot hold all rows at once; give more --ram, a shorter --seq-len, or "
            "--head-rows 64 to accept different bits"
        )

    def _has_bits_of_whole(self, blocks: list[tuple[int, int]]) -> bool:
        """Return whether these blocks give both products the bits of all rows.

        The first block, the last and one between are tested.
        """
        rows, item = blocks[-1][1], self._dtype.itemsize
        output_bytes = self._width * item + rows * (3 * item + torch.float32.itemsize)
        outputs = max(_COMPARED_BYTES // output_bytes // _STEP_OUTPUTS * _STEP_OUTPUTS, _MIN_OUTPUTS)
        drawn = Operands(self._dtype)
        weight = mirrored(mirrored(drawn.numbers(min(outputs, self._outputs), self._width), 1, -1), 0, -1)
        bias = drawn.numbers(weight.shape[0]).mul_(RESIDUE) if self._biased else None
        hidden = mirrored(drawn.numbers(rows, self._width), 1, 1).requires_grad_()
        gradient = mirrored(drawn.numbers(rows, weight.shape[0]), 1, 1)
        seen = {blocks[0], blocks[len(blocks) // 2], blocks[-1]}
        logits = F.linear(hidden[None], weight, bias)[0]
        (given,) = torch.autograd.grad(logits, hidden, gradient)
        with torch.no_grad():
            return tiles_equal(
                logits, ((a, b, F.linear(hidden[None, a:b], weight, bias)[0]) for a, b in seen)
            ) and tiles_equal(given, ((a, b, gradient[a:b].clone().mm(weight)) for a, b in seen))
