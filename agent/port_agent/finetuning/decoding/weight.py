"""A weight that is decoded some rows at a time."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

_ROW_STEP = 64
"""Number of rows of which parts begin at multiples, because codes of neighbouring rows may share a word."""
_PART_ITEMS = 1 << 19
"""Largest number of weights in a part, unless fewer rows than the step have more."""


@dataclass(frozen=True, slots=True)
class DecodedWeight:
    """A weight's shape, and a function that returns its rows from one up to another, decoded to 32 bits.

    `is_coded`: whether it is stored in codes, rather than in floats.
    """

    shape: tuple[int, ...]
    rows: Callable[[int, int], torch.Tensor]
    is_coded: bool

    @property
    def items(self) -> int:
        """The number of its items."""
        return math.prod(self.shape)

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield its rows from first to last, decoded, some at a time."""
        count = self.shape[0] if self.shape else 1
        step = max(_ROW_STEP, _PART_ITEMS * count // max(1, self.items) // _ROW_STEP * _ROW_STEP)
        for start in range(0, count, step):
            yield self.rows(start, min(start + step, count))
