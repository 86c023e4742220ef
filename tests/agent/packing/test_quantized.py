"""Weights on a grid are decoded to the bits of arithmetic in 32 bits, by every
implementation, any rectangle of them.
"""

import numpy as np
import pytest
import torch

from port_agent.packing import PackingError, Quantization, codec
from port_agent.packing.quantized import NF4_LEVELS, QuantizedMatrix, decode

ROWS, GUARD = 7, 0xA5
SCALES = (0.0, 1.0, 1e-30, 1e-40, 3e38, 0.013, 1 / 3)
"""Among them those that make zeros, denormals and infinities."""

each_level = pytest.mark.parametrize("level", range(codec.best_level() + 1))
each_grid = pytest.mark.parametrize("quantization", Quantization)


def matrix_of(quantization: Quantization) -> tuple[QuantizedMatrix, torch.Tensor, list[object]]:
    """Return a matrix of ROWS rows of five blocks, its values in 32 bits, and what keeps its memory."""
    draw, columns = np.random.default_rng(0), 5 * quantization.block
    codes = draw.integers(0, 256, (ROWS, columns * quantization.code_bits // 8), np.uint8)
    scales = np.resize(np.array(SCALES, np.float32), (ROWS, 5)).copy()
    if quantization is Quantization.NF4:
        numbers = np.stack([codes & 15, codes >> 4], -1).reshape(ROWS, columns)
        levels = np.array(NF4_LEVELS, np.float32)[numbers]
    else:
        levels = codes.view(np.int8).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        values = levels * np.repeat(scales, quantization.block, axis=1)
    return (
        QuantizedMatrix(quantization, codes.ctypes.data, scales.ctypes.data, columns),
        torch.from_numpy(values),
        [codes, scales],
    )


@each_level
@each_grid
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "blocks"), [((0, ROWS), (0, 5)), ((2, 3), (4, 5)), ((1, 6), (1, 4)), ((3, 3), (0, 5))]
)
def test_a_rectangle_has_the_bits_of_arithmetic(
    rows: tuple[int, int], blocks: tuple[int, int], dtype: torch.dtype, quantization: Quantization, level: int
) -> None:
    matrix, values, _memory = matrix_of(quantization)
    columns = range(blocks[0] * quantization.block, blocks[1] * quantization.block)
    expected = values[rows[0] : rows[1], columns.start : columns.stop].to(dtype).contiguous()
    lead = 2  # bfloat16's alignment, and less than a float's
    made = torch.full((lead + expected.nbytes + 64,), GUARD, dtype=torch.uint8)
    decode(matrix, range(*rows), columns, dtype.itemsize, made.data_ptr() + lead, level=level)
    inside = made[lead : lead + expected.nbytes]
    assert inside.numpy().tobytes() == expected.view(torch.uint8).numpy().tobytes()
    assert (made[:lead] == GUARD).all() and (made[lead + expected.nbytes :] == GUARD).all()


@each_grid
def test_parts_of_blocks_are_refused(quantization: Quantization) -> None:
    matrix, _, _memory = matrix_of(quantization)
    target = torch.zeros(ROWS * 5 * quantization.block)
    for columns in (
        range(1, quantization.block),
        range(quantization.block // 2),
        range(quantization.block, 6 * quantization.block),
    ):
        with pytest.raises(PackingError, match="not whole blocks"):
            decode(matrix, range(ROWS), columns, 4, target.data_ptr())
    with pytest.raises(PackingError, match="3 bytes are not an item"):
        decode(matrix, range(ROWS), range(quantization.block), 3, target.data_ptr())
    assert not target.any()
