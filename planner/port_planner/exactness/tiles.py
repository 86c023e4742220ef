"""The comparison of a product in tiles with the whole product, and its operands."""

from collections.abc import Iterable

import torch

from port_planner.base.tensor_bytes import same_bits


class Operands:
    """Random operands of one comparison, the same in every process; they must be `mirrored`, so that sums cancel."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, spread: float = 1.0) -> None:
        """`spread`: standard deviation."""
        self._dtype, self._spread, self.generator = dtype, spread, torch.Generator().manual_seed(seed)

    def numbers(self, *shape: int) -> torch.Tensor:
        """Return numbers in rows."""
        return torch.empty(shape, dtype=self._dtype).normal_(0, self._spread, generator=self.generator)

    def like(self, layout: torch.Tensor) -> torch.Tensor:
        """Return numbers in the layout of a tensor, which may have no memory, alone in their storage."""
        span = 1 + sum((n - 1) * stride for n, stride in zip(layout.shape, layout.stride(), strict=True))
        return self.numbers(span).as_strided(layout.shape, layout.stride())


def tiles_equal(whole: torch.Tensor, tiles: Iterable[tuple[int, int, torch.Tensor]], dim: int = 0) -> bool:
    """Return whether each tile has the bits of the whole between its beginning and its end along a dimension."""
    return all(same_bits(whole.narrow(dim, start, stop - start), tile) for start, stop, tile in tiles)
