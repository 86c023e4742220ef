"""Quantized weights: a code for each weight and a 32-bit scale for each block of a row,
decoded to floats by address.
"""

import ctypes
from dataclasses import dataclass
from enum import StrEnum

from port_agent.packing.codec import PackingError, library_and_level, loaded_library


class Quantization(StrEnum):
    """The values that a weight may have, as multiples of its block's scale."""

    NF4 = "nf4"
    """The 16 quantiles of the normal distribution of QLoRA (arXiv 2305.14314, appendix E): 4.5 bits a weight."""
    INT8 = "int8"
    """-127 to 127, with 8.25 bits a weight."""

    @property
    def block(self) -> int:
        """Return how many weights share a scale."""
        return 64 if self is Quantization.NF4 else 128

    @property
    def code_bits(self) -> int:
        """Return the number of bits of a code. Of two codes in a byte, the first is in the low half."""
        return 4 if self is Quantization.NF4 else 8

    @property
    def largest(self) -> float:
        """Return the level of the weight with the largest magnitude in its block."""
        return 1.0 if self is Quantization.NF4 else 127.0


NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

_LEVELS = (ctypes.c_float * len(NF4_LEVELS))(*NF4_LEVELS)


def encode_quantized(
    quantization: Quantization, address: int, count: int, item_bytes: int, codes: int, scales: int
) -> bool:
    """Write the codes and scales of the items at `address`, bfloat16 (`item_bytes` 2) or floats (4), if
    they are exactly quantized.

    `decode` then restores them to the bit. Returns False, with undefined contents, if they are not
    quantized, or not whole blocks.
    """
    levels = ctypes.addressof(_LEVELS) if quantization is Quantization.NF4 else None
    return bool(loaded_library().port_grid_encode(address, count, item_bytes, levels, codes, scales) >= 0)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """The location of a quantized matrix: codes and scales by address, both row by row."""

    quantization: Quantization
    codes: int
    scales: int
    row_items: int
    """Number of items in a row, a multiple of the block size."""


def decode(
    matrix: QuantizedMatrix, rows: range, columns: range, item_bytes: int, target: int, *, level: int | None = None
) -> None:
    """Write rows and columns of a matrix to `target`, row after row, as bfloat16 (`item_bytes` 2) or floats (4).

    A value is its level times its block's scale in 32 bits, rounded to nearest, ties to even. `level` forces an
    implementation, as in `pack`. Raises PackingError for columns that are not whole blocks.
    """
    library, level = library_and_level(level)
    levels = ctypes.addressof(_LEVELS) if matrix.quantization is Quantization.NF4 else None
    written = library.port_grid_decode(
        level,
        matrix.codes,
        matrix.scales,
        levels,
        matrix.row_items,
        rows.start,
        len(rows),
        columns.start,
        len(columns),
        item_bytes,
        target,
    )
    if written < 0:
        raise PackingError(
            f"columns {columns.start} to {columns.stop} of rows of {matrix.row_items} are not whole blocks of "
            f"{matrix.quantization.block} items, or {item_bytes} bytes are not an item"
        )
