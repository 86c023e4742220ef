"""Linear layers with a quantized frozen weight, with the bits of the same layers over the decoded weight.

GPT-2's kind stores its weight transposed, [in, out], and quantizes blocks along its rows. The product runs in blocks:
each block is decoded and multiplied, and the next one reuses its memory. A comparison, once for each shape and number
of threads, shows whether kernels compute blocks of a product to the bits of the whole; if not, the whole weight is
decoded for each product.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from port_agent.finetuning.inputs.libraries import Conv1D
from port_agent.intercept.residency.storages import address_of
from port_agent.intercept.tiles.products import STORED, column_blocks, large_product_equal_in_blocks
from port_agent.packing.quantized import NF4_LEVELS, Quantization, QuantizedMatrix, decode
from port_planner.base.tensor_bytes import same_bits
from port_planner.exactness.cancelling import RESIDUE, mirrored
from port_planner.exactness.kept_answers import KeptAnswers
from port_planner.exactness.tiles import Operands

BLOCK_BYTES = 2 << 20
"""Approximate bytes of a decoded block: larger blocks take more of the budget, and smaller ones more time for calls."""

Array: TypeAlias = npt.NDArray[np.float32]

_MAX_DRAWN_BYTES = 64 << 20
"""Largest weight in bytes that is compared with random numbers everywhere.

A larger one, such as a head's, has them in some places and takes no RAM elsewhere.
"""

_STEP = 128
"""Number of which block sizes are multiples: of the blocks of both quantizations, and of what
kernels compute side by side.
"""


class _QuantizedLayer(nn.Module):
    """Common parts of layers whose weight is codes and scales."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(
        self,
        quantization: Quantization,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
    ) -> None:
        """`codes`: uint8 [rows, columns * bits / 8].

        `scales`: float32 [rows, columns / block]. `dtype`: of the decoded weight.
        """
        nn.Module.__init__(self)
        self._take_sizes(codes.shape[0], codes.shape[1] * 8 // quantization.code_bits)
        self.quantization, self.dtype = quantization, dtype
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_parameter("bias", bias)

    def _take_sizes(self, rows: int, columns: int) -> None:
        """Store the size of the weight under the attribute names of this kind of layer."""
        raise NotImplementedError

    def decoded(self) -> torch.Tensor:
        """Return the decoded weight, in the layout of its codes."""
        whole: torch.Tensor = torch.ops.port_agent.dequantize(
            self.codes, self.scales, self.quantization.value, self.dtype
        )
        return whole


class QuantizedLinear(_QuantizedLayer, nn.Linear):
    """A linear layer whose weight, [out, in], is codes and scales; only its bias and its input may need gradients."""

    def _take_sizes(self, rows: int, columns: int) -> None:
        self.out_features, self.in_features = rows, columns

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """An empty tensor of the decoded weight's data type, because peft asks for this and for the device."""
        return torch.empty(0, dtype=self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product, [..., out], for an input of [..., in]."""
        flat = input.reshape(-1, self.in_features)
        product: Any = WeightProduct.apply
        out: torch.Tensor = product(
            flat, self.codes, self.scales, self.bias, self.quantization.value, self.dtype, False
        )
        return out.view(*input.shape[:-1], self.out_features)


class QuantizedConv1D(_QuantizedLayer, Conv1D):
    """A layer of GPT-2's kind whose weight, [in, out], is codes and scales; only its bias and its input may need
    gradients.
    """

    def _take_sizes(self, rows: int, columns: int) -> None:
        self.nx, self.nf = rows, columns

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """A tensor of the decoded weight's shape and data type that repeats one number, because peft asks for
        these and for the device.
        """
        return torch.empty(1, dtype=self.dtype).expand(self.nx, self.nf)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, [..., out], for an input of [..., in]."""
        product: Any = WeightProduct.apply
        out: torch.Tensor = product(
            x.reshape(-1, self.nx), self.codes, self.scales, self.bias, self.quantization.value, self.dtype, True
        )
        return out.view(*x.shape[:-1], self.nf)


def encode_weight(quantization: Quantization, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a weight, [rows, in], each item at the nearest level.

    Of two equally near levels, NF4 takes the lower, INT8 the even one. Raises ValueError if a weight is not a valid
    number.
    """
    blocks = quantized_blocks(quantization, weight)
    scales = scales_of(quantization, blocks)
    return torch.from_numpy(codes_of(quantization, blocks, scales)), torch.from_numpy(scales)


def quantized_blocks(quantization: Quantization, weight: torch.Tensor) -> Array:
    """Return a weight, [rows, in], in 32 bits, divided into the blocks that share a scale, [rows, blocks, items].

    It is read once, by a copy, because reading some rows of a mapped weight loads no others. After that numpy computes,
    so that temporaries are not tensors for which the interceptor would evict others.
    """
    copied: Array = weight.to(torch.float32, copy=True).view(weight.shape[0], -1, quantization.block).numpy()
    return copied


def scales_of(quantization: Quantization, blocks: Array) -> Array:
    """Return the scale of each block, [rows, blocks]. Raises ValueError if a weight is not a valid number."""
    scales: Array = np.abs(blocks).max(axis=-1) / np.float32(quantization.largest)
    if not np.isfinite(scales).all():
        raise ValueError("a weight is infinite or not a number (NaN)")
    return scales


def codes_of(quantization: Quantization, blocks: Array, scales: Array) -> npt.NDArray[np.uint8]:
    """Return the codes of all items, row by row: one byte each for INT8, half a byte for NF4."""
    levels = (blocks / np.where(scales == 0, np.float32(1.0), scales)[..., None]).reshape(len(blocks), -1)
    if quantization is Quantization.INT8:
        return np.rint(levels, out=levels).astype(np.int8).view(np.uint8)
    known = np.array(NF4_LEVELS, dtype=np.float32)
    codes: npt.NDArray[np.uint8] = np.searchsorted((known[1:] + known[:-1]) / np.float32(2.0), levels).astype(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)


class WeightProduct(torch.autograd.Function):
    """`nn.functional.linear` over a decoded weight, or `addmm` with a transposed one; [rows, in] to [rows, out]."""

    @staticmethod
    def forward(
        ctx: Any,
        flat: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        grid: str,
        dtype: torch.dtype,
        transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.grid, ctx.dtype, ctx.transposed = grid, dtype, transposed
        return product_in_blocks("grid_addmm" if transposed else "grid_linear", flat, codes, scales, bias, grid, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        (gradient,) = gradients
        given = summed = None
        if ctx.needs_input_grad[0]:
            name = "grid_addmm_input_gradient" if ctx.transposed else "grid_input_gradient"
            given = product_in_blocks(name, gradient, codes, scales, None, ctx.grid, ctx.dtype)
        if ctx.needs_input_grad[3]:
            summed = gradient.sum(0)
        return given, None, None, summed, None, None, None


_Multiply: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Product:
    """A product with a quantized weight: plain PyTorch's operation, and whether rows or columns of the weight
    correspond to those of the result.
    """

    multiply: _Multiply
    by_rows: bool

    def extent(self, shape: tuple[int, int]) -> int:
        """Return how many rows or columns of a weight of this shape correspond to those of the result."""
        return shape[0 if self.by_rows else 1]


_PRODUCTS = {
    "grid_linear": _Product(nn.functional.linear, by_rows=True),
    "grid_input_gradient": _Product(lambda flat, weight, bias: torch.mm(flat, weight), by_rows=False),
    "grid_addmm": _Product(lambda flat, weight, bias: torch.addmm(bias, flat, weight), by_rows=False),
    "grid_addmm_input_gradient": _Product(lambda flat, weight, bias: torch.mm(flat, weight.t()), by_rows=True),
}

_equal_in_blocks = KeptAnswers()


def product_in_blocks(
    name: str,
    flat: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    grid: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a product of `_PRODUCTS` by blocks, or whole if blocks have different bits.

    `grid`: a `Quantization`, or STORED.
    """
    shape = codes.shape[0], _row_items(codes, grid)
    step = _step(_PRODUCTS[name], shape, dtype)
    form: tuple[object, ...] = (name, flat.shape, flat.stride(), shape, dtype, bias is None, step)
    if bias is None and shape[0] * shape[1] * dtype.itemsize > _MAX_DRAWN_BYTES:
        form = (*form, "of a large weight")
    if not _equal_in_blocks.equal(form, lambda: _has_bits_of_whole(_PRODUCTS[name], flat, shape, bias, dtype)):
        whole = torch.ops.port_agent.dequantize(codes, scales, grid, dtype)
        return _PRODUCTS[name].multiply(flat, whole, bias)
    made: torch.Tensor = getattr(torch.ops.port_agent, name)(flat, codes, scales, bias, grid, dtype)
    return made


def _has_bits_of_whole(
    product: _Product, flat: torch.Tensor, shape: tuple[int, int], bias: torch.Tensor | None, dtype: torch.dtype
) -> bool:
    """Return whether a product of this form has the bits of the whole in blocks, for numbers whose sums cancel."""
    if bias is None and shape[0] * shape[1] * dtype.itemsize > _MAX_DRAWN_BYTES:
        step = _step(product, shape, dtype)
        return 2 * step > product.extent(shape) or large_product_equal_in_blocks(
            flat, shape, step, by_rows=product.by_rows
        )
    drawn = Operands(dtype)
    given = mirrored(drawn.like(flat), 1, 1)
    weight = mirrored(drawn.numbers(*shape), 1 if product.by_rows else 0, -1)
    added = None if bias is None else drawn.like(bias).mul_(RESIDUE)

    def part(rows: range, columns: range) -> torch.Tensor:
        of = weight[rows.start : rows.stop, columns.start : columns.stop]
        return of.clone(memory_format=torch.contiguous_format)

    return same_bits(product.multiply(given, weight, added), _in_blocks(product, given, part, shape, added))


def _in_blocks(
    product: _Product,
    flat: torch.Tensor,
    part: Callable[[range, range], torch.Tensor],
    shape: tuple[int, int],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Run a product block by block. `part` returns rows and columns of a weight of this shape, in new memory."""
    rows, columns = shape
    extent = product.extent(shape)
    out = torch.empty((flat.shape[0], extent), dtype=flat.dtype)
    for start, stop in column_blocks(extent, _step(product, shape, flat.dtype)):
        taken = range(start, stop)
        block = part(taken, range(columns)) if product.by_rows else part(range(rows), taken)
        out[:, start:stop] = product.multiply(flat, block, None if bias is None else bias[start:stop])
    return out


def _step(product: _Product, shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Return how many rows or columns of a weight of this shape make a block of the product."""
    extent = product.extent(shape)
    other = shape[1 if product.by_rows else 0]
    fit = BLOCK_BYTES // (other * dtype.itemsize) // _STEP * _STEP
    return min(max(fit, _STEP), extent)


# -- operators, which `exec` sees like torch's own: their operands are made resident first

_SIGNATURE = "(Tensor flat, Tensor codes, Tensor scales, Tensor? bias, str grid, ScalarType dtype) -> Tensor"
_operators = torch.library.Library("port_agent", "DEF")
_operators.define("dequantize(Tensor codes, Tensor scales, str grid, ScalarType dtype) -> Tensor")


def _row_items(codes: torch.Tensor, grid: str) -> int:
    return codes.shape[1] if grid == STORED else codes.shape[1] * 8 // Quantization(grid).code_bits


def _decoded(
    codes: torch.Tensor, scales: torch.Tensor, quantization: str, dtype: torch.dtype, rows: range, columns: range
) -> torch.Tensor:
    """Return decoded rows and columns of a weight."""
    if quantization == STORED:
        part = codes[rows.start : rows.stop, columns.start : columns.stop]
        return part.to(dtype, copy=True, memory_format=torch.contiguous_format)
    made = torch.empty((len(rows), len(columns)), dtype=dtype)
    matrix = QuantizedMatrix(
        Quantization(quantization), address_of(codes), address_of(scales), _row_items(codes, quantization)
    )
    decode(matrix, rows, columns, made.element_size(), address_of(made))
    return made


def _define(name: str, product: _Product) -> None:
    """Define a product as a torch operator."""

    def computed(
        flat: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        quantization: str,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        part = functools.partial(_decoded, codes, scales, quantization, dtype)
        return _in_blocks(product, flat, part, (codes.shape[0], _row_items(codes, quantization)), bias)

    def of_shape(
        flat: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        quantization: str,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return flat.new_empty((flat.shape[0], codes.shape[0] if product.by_rows else _row_items(codes, quantization)))

    _operators.define(f"{name}{_SIGNATURE}")
    _operators.impl(name, computed, "CPU")
    _operators.impl(name, of_shape, "Meta")


for _name, _kind in _PRODUCTS.items():
    _define(_name, _kind)
_operators.impl(
    "dequantize",
    lambda codes, scales, quantization, dtype: _decoded(
        codes, scales, quantization, dtype, range(codes.shape[0]), range(_row_items(codes, quantization))
    ),
    "CPU",
)
_operators.impl(
    "dequantize",
    lambda codes, scales, quantization, dtype: codes.new_empty(
        (codes.shape[0], _row_items(codes, quantization)), dtype=dtype
    ),
    "Meta",
)
