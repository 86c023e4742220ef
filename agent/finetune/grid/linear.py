"""Linear layers whose frozen weight lies on a grid, with the bits of the same layers over the decoded weight.

GPT-2's kind keeps its weight transposed, [in, out], and has its blocks of the grid along that one's rows.

The product runs in blocks: one is decoded, multiplied, and its memory used for the next. Kernels that compute blocks of a
product to the bits of the whole are seen by comparing, once for each shape and number of threads; else the whole weight
is decoded for each product.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from agent.finetune.libraries import Conv1D
from agent.follow.parts.kept_comparisons import KeptComparisons
from agent.follow.parts.products import column_blocks, tells_orders_apart
from agent.follow.storages import address_of
from agent.packing.grids import NF4_LEVELS, GridMatrix, QuantizationGrid, decode
from planner.ir.tensor_bytes import same_bits

BLOCK_BYTES = 4 << 20
"""Of decoded weight, about: more takes more of the budget, less pays for calls."""

Array: TypeAlias = npt.NDArray[np.float32]

_STEP = 128
"""Blocks are multiples of it: of both grids' blocks, and of what kernels compute side by side."""


class _OnGrid(nn.Module):
    """What layers have in common whose weight is codes and scales."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(
        self, grid: QuantizationGrid, codes: torch.Tensor, scales: torch.Tensor, bias: nn.Parameter | None, dtype: torch.dtype
    ) -> None:  # fmt: skip
        """`codes`: uint8 [rows, columns * bits / 8]. `scales`: float32 [rows, columns / block]. `dtype`: of the decoded weight."""
        nn.Module.__init__(self)
        self._take_sizes(codes.shape[0], codes.shape[1] * 8 // grid.code_bits)
        self.grid, self.dtype = grid, dtype
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_parameter("bias", bias)

    def _take_sizes(self, rows: int, columns: int) -> None:
        """Keep the size of the weight under the names of the layer's kind."""
        raise NotImplementedError

    def decoded(self) -> torch.Tensor:
        """Return the weight, laid out as its codes are."""
        whole: torch.Tensor = torch.ops.port_agent.grid_decode(self.codes, self.scales, self.grid.value, self.dtype)
        return whole


class GridLinear(_OnGrid, nn.Linear):
    """A linear layer whose weight, [out, in], is codes and scales; only its bias and what it is given may be trained."""

    def _take_sizes(self, rows: int, columns: int) -> None:
        self.out_features, self.in_features = rows, columns

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """An empty tensor of the decoded weight's data type: peft asks for that, and for the device."""
        return torch.empty(0, dtype=self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product, [..., out], for an input of [..., in]."""
        flat = input.reshape(-1, self.in_features)
        product: Any = _GridProduct.apply
        out: torch.Tensor = product(flat, self.codes, self.scales, self.bias, self.grid, self.dtype, False)
        return out.view(*input.shape[:-1], self.out_features)


class GridConv1D(_OnGrid, Conv1D):
    """A layer of GPT-2's kind whose weight, [in, out], is codes and scales; only its bias and what it is given may be trained."""

    def _take_sizes(self, rows: int, columns: int) -> None:
        self.nx, self.nf = rows, columns

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """A tensor of the decoded weight's shape and data type, of one number: peft asks for those, and for the device."""
        return torch.empty(1, dtype=self.dtype).expand(self.nx, self.nf)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, [..., out], for an input of [..., in]."""
        product: Any = _GridProduct.apply
        out: torch.Tensor = product(
            x.reshape(-1, self.nx), self.codes, self.scales, self.bias, self.grid, self.dtype, True
        )
        return out.view(*x.shape[:-1], self.nf)


def encode_weight(grid: QuantizationGrid, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a weight, [rows, in], each item at the level nearest to it.

    Of two that are equally near, the lower of NF4, the even of INT8. Raises ValueError where a weight is no number.
    """
    blocks = grid_blocks(grid, weight)
    scales = scales_of(grid, blocks)
    return torch.from_numpy(codes_of(grid, blocks, scales)), torch.from_numpy(scales)


def grid_blocks(grid: QuantizationGrid, weight: torch.Tensor) -> Array:
    """Return a weight, [rows, in], in 32 bits by the blocks that share a scale, [rows, blocks, items].

    It is read once, by a copy: of rows of a weight that lies in its file, no others come in. From here numpy computes: what it makes on
    the way is no tensor, for which a budget would make room among those that are followed.
    """
    copied: Array = weight.to(torch.float32, copy=True).view(weight.shape[0], -1, grid.block).numpy()
    return copied


def scales_of(grid: QuantizationGrid, blocks: Array) -> Array:
    """Return the scale of each block, [rows, blocks]. Raises ValueError where a weight is no number."""
    scales: Array = np.abs(blocks).max(axis=-1) / np.float32(grid.largest)
    if not np.isfinite(scales).all():
        raise ValueError("a weight is infinite or no number")
    return scales


def codes_of(grid: QuantizationGrid, blocks: Array, scales: Array) -> npt.NDArray[np.uint8]:
    """Return the codes of all items, row by row: of INT8 a byte each, of NF4 two in a byte."""
    levels = (blocks / np.where(scales == 0, np.float32(1.0), scales)[..., None]).reshape(len(blocks), -1)
    if grid is QuantizationGrid.INT8:
        return np.rint(levels, out=levels).astype(np.int8).view(np.uint8)
    known = np.array(NF4_LEVELS, dtype=np.float32)
    codes: npt.NDArray[np.uint8] = np.searchsorted((known[1:] + known[:-1]) / np.float32(2.0), levels).astype(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)


class _GridProduct(torch.autograd.Function):
    """`nn.functional.linear` over a decoded weight, or `addmm` with a transposed one; [rows, in] to [rows, out]."""

    @staticmethod
    def forward(
        ctx: Any, flat: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, grid: QuantizationGrid,
        dtype: torch.dtype, transposed: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(codes, scales)
        ctx.grid, ctx.dtype, ctx.transposed = grid, dtype, transposed
        return _product("grid_addmm" if transposed else "grid_linear", flat, codes, scales, bias, grid, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        (gradient,) = gradients
        given = summed = None
        if ctx.needs_input_grad[0]:
            name = "grid_addmm_input_gradient" if ctx.transposed else "grid_input_gradient"
            given = _product(name, gradient, codes, scales, None, ctx.grid, ctx.dtype)
        if ctx.needs_input_grad[3]:
            summed = gradient.sum(0)
        return given, None, None, summed, None, None, None


_WHOLE: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]] = {
    "grid_linear": nn.functional.linear,
    "grid_input_gradient": lambda flat, weight, bias: torch.mm(flat, weight),
    "grid_addmm": lambda flat, weight, bias: torch.addmm(bias, flat, weight),
    "grid_addmm_input_gradient": lambda flat, weight, bias: torch.mm(flat, weight.t()),
}
"""What the operators below compute, as plain PyTorch does."""

_equal_in_blocks = KeptComparisons()


def _product(
    name: str, flat: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, grid: QuantizationGrid,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return a product by blocks, or whole where this form has not been compared yet, or differs."""
    form = (name, flat.shape, flat.stride(), codes.shape, grid, dtype, bias is None)
    blockwise = getattr(torch.ops.port_agent, name)
    known = _equal_in_blocks.get(form)
    if not known:
        whole = _WHOLE[name](flat, torch.ops.port_agent.grid_decode(codes, scales, grid.value, dtype), bias)
        if known is None and tells_orders_apart(flat):
            parts = blockwise(flat, codes, scales, bias, grid.value, dtype)
            _equal_in_blocks.note(form, equal=same_bits(whole, parts))
        return whole
    made: torch.Tensor = blockwise(flat, codes, scales, bias, grid.value, dtype)
    return made


# -- operators, which `exec` sees as it sees torch's own: what they read is made resident first

_SIGNATURE = "(Tensor flat, Tensor codes, Tensor scales, Tensor? bias, str grid, ScalarType dtype) -> Tensor"
_operators = torch.library.Library("port_agent", "DEF")
_operators.define(f"grid_linear{_SIGNATURE}")
_operators.define(f"grid_input_gradient{_SIGNATURE}")
_operators.define(f"grid_addmm{_SIGNATURE}")
_operators.define(f"grid_addmm_input_gradient{_SIGNATURE}")
_operators.define("grid_decode(Tensor codes, Tensor scales, str grid, ScalarType dtype) -> Tensor")


def _row_items(codes: torch.Tensor, grid: str) -> int:
    return codes.shape[1] * 8 // QuantizationGrid(grid).code_bits


def _decode_into(
    target: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, grid: str, rows: range, columns: range
) -> None:
    matrix = GridMatrix(QuantizationGrid(grid), address_of(codes), address_of(scales), _row_items(codes, grid))
    decode(matrix, rows, columns, target.element_size(), address_of(target))


def _step(extent: int, other: int, dtype: torch.dtype) -> int:
    """Return how many of `extent` rows or columns of length `other` make a block."""
    fit = BLOCK_BYTES // (other * dtype.itemsize) // _STEP * _STEP
    return min(max(fit, _STEP), extent)


def _grid_linear(
    flat: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, grid: str, dtype: torch.dtype
) -> torch.Tensor:  # fmt: skip
    rows, inner = codes.shape[0], flat.shape[1]
    out = torch.empty((flat.shape[0], rows), dtype=dtype)
    for start, stop in column_blocks(rows, _step(rows, inner, dtype)):
        block = torch.empty((stop - start, inner), dtype=dtype)
        _decode_into(block, codes, scales, grid, range(start, stop), range(inner))
        out[:, start:stop] = torch.nn.functional.linear(flat, block, None if bias is None else bias[start:stop])
    return out


def _grid_input_gradient(
    flat: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, grid: str, dtype: torch.dtype
) -> torch.Tensor:  # fmt: skip
    rows, columns = codes.shape[0], _row_items(codes, grid)
    out = torch.empty((flat.shape[0], columns), dtype=dtype)
    for start, stop in column_blocks(columns, _step(columns, rows, dtype)):
        block = torch.empty((rows, stop - start), dtype=dtype)
        _decode_into(block, codes, scales, grid, range(rows), range(start, stop))
        out[:, start:stop] = torch.mm(flat, block)
    return out


def _grid_addmm(
    flat: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, grid: str, dtype: torch.dtype
) -> torch.Tensor:  # fmt: skip
    rows, columns = codes.shape[0], _row_items(codes, grid)
    out = torch.empty((flat.shape[0], columns), dtype=dtype)
    for start, stop in column_blocks(columns, _step(columns, rows, dtype)):
        block = torch.empty((rows, stop - start), dtype=dtype)
        _decode_into(block, codes, scales, grid, range(rows), range(start, stop))
        out[:, start:stop] = torch.addmm(bias[start:stop], flat, block)
    return out


def _grid_addmm_input_gradient(
    flat: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, grid: str, dtype: torch.dtype
) -> torch.Tensor:  # fmt: skip
    rows, columns = codes.shape[0], _row_items(codes, grid)
    out = torch.empty((flat.shape[0], rows), dtype=dtype)
    for start, stop in column_blocks(rows, _step(rows, columns, dtype)):
        block = torch.empty((stop - start, columns), dtype=dtype)
        _decode_into(block, codes, scales, grid, range(start, stop), range(columns))
        out[:, start:stop] = torch.mm(flat, block.t())
    return out


def _grid_decode(codes: torch.Tensor, scales: torch.Tensor, grid: str, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.empty((codes.shape[0], _row_items(codes, grid)), dtype=dtype)
    _decode_into(whole, codes, scales, grid, range(whole.shape[0]), range(whole.shape[1]))
    return whole


def _shape_of_rows(flat: torch.Tensor, codes: torch.Tensor, *_: Any) -> torch.Tensor:
    return flat.new_empty((flat.shape[0], codes.shape[0]))


def _shape_of_columns(
    flat: torch.Tensor, codes: torch.Tensor, scales: Any, bias: Any, grid: str, _: Any
) -> torch.Tensor:
    return flat.new_empty((flat.shape[0], _row_items(codes, grid)))


for _name, _compute, _shape in (
    ("grid_linear", _grid_linear, _shape_of_rows),
    ("grid_input_gradient", _grid_input_gradient, _shape_of_columns),
    ("grid_addmm", _grid_addmm, _shape_of_columns),
    ("grid_addmm_input_gradient", _grid_addmm_input_gradient, _shape_of_rows),
):
    _operators.impl(_name, _compute, "CPU")
    _operators.impl(_name, _shape, "Meta")
_operators.impl("grid_decode", _grid_decode, "CPU")
_operators.impl(
    "grid_decode",
    lambda codes, scales, grid, dtype: codes.new_empty((codes.shape[0], _row_items(codes, grid)), dtype=dtype),
    "Meta",
)
