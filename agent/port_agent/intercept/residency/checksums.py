"""A sum over a storage's bytes, on its device, by which a write past the operators is found."""

import torch

PART_BYTES = 16 << 20
"""Bytes that are added up at once. With more rows, CUDA's sums of columns take twice the bytes that they read; with
this many, a few KiB (on an H200)."""
_COLUMNS = 1 << 12
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""The golden ratio's digits as an odd number: each product with it is another one."""


class Checksums:
    """Adds up bytes of one device. Words stand in rows; each word counts by its row and its column."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.release()

    def of(self, contents: torch.Tensor) -> torch.Tensor:
        """Return a number, on their device, that `contents` (bytes) add up to; another one, but for chance, where one
        of them or their order differs.

        Reads them twice. Raises torch.OutOfMemoryError.
        """
        first, *others = contents.split(PART_BYTES)
        total = self._part(first)
        for part in others:
            total = total * _ODD + self._part(part)
        return total

    def release(self) -> None:
        """Free what is kept on the device for the next sum."""
        self._weights = torch.empty(0, dtype=torch.int64)

    def _part(self, part: torch.Tensor) -> torch.Tensor:
        in_words = part.numel() // 8 * 8
        words = part[:in_words].view(torch.int64)
        gridded = words.numel() // _COLUMNS * _COLUMNS
        sums = [words[gridded:], part[in_words:].to(torch.int64)]
        if gridded:
            grid = words[:gridded].view(-1, _COLUMNS)
            sums += [grid.sum(0), 2 * grid.sum(1)]  # an odd number and an even one: no bit of a word is lost
        together = torch.cat(sums)
        return (together * self._first_weights(together.numel())).sum()

    def _first_weights(self, count: int) -> torch.Tensor:
        """Return odd numbers without a pattern, so that neither places nor sums of two places have equal ones."""
        if self._weights.numel() < count:
            made = torch.arange(1, count + 1, device=self._device) * _ODD
            self._weights = (made ^ (made >> 29)) * _ODD | 1
        return self._weights[:count]
