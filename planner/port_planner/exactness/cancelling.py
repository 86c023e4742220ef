"""Synthetic numbers whose sums cancel, which reveal the order in which a kernel adds.

Sums are kept in 32 bits and rounded to the 16 of a result. In half precision, a different order shows in one of 64,000
sums of ordinary numbers. It shows in one of three of these, because only the rounding errors remain (measured with the
matrix units of an Intel Xeon).
"""

from collections.abc import Mapping

import torch

from port_planner.operators.row import Product

RESIDUE = 2.0**-20
"""Size of the addend: about the rounding error of cancelling 32-bit sums, which it does not hide."""


def mirrored(numbers: torch.Tensor, dim: int, sign: int) -> torch.Tensor:
    """Make the second half of the numbers along a dimension `sign` times the first half, mirrored, and return them.

    So two halves that are summed separately are in different orders, and do not cancel without a trace. A sum over that
    dimension, of products with an operand mirrored by the other sign, is only the rounding error. If the length is odd,
    the last number becomes zero.
    """
    extent = numbers.shape[dim]
    half = extent // 2
    numbers.narrow(dim, half, half).copy_(numbers.narrow(dim, 0, half).flip(dim)).mul_(sign)
    if half and extent % 2:
        numbers.narrow(dim, extent - 1, 1).zero_()
    return numbers


def cancel(product: Product, numbers: Mapping[int, torch.Tensor]) -> None:
    """Mirror the factors of a product, given by argument, so that its sums cancel, and make its addend small."""
    for dim, one, other in product.sums:
        extent = min(numbers[a].shape[product.dims[a].index(dim)] for a in (one, other))
        for argument, sign in ((one, 1), (other, -1)):
            place = product.dims[argument].index(dim)
            groups = _without_repeats(numbers[argument]).unflatten(
                place, (-1, extent)
            )  # as convolutions in groups have
            mirrored(groups, place + 1, sign)
    if product.addend is not None and product.addend in numbers:
        _without_repeats(numbers[product.addend]).mul_(RESIDUE)


def _without_repeats(numbers: torch.Tensor) -> torch.Tensor:
    """Return a view in which every number appears once."""
    for dim, stride in enumerate(numbers.stride()):
        if stride == 0 and numbers.shape[dim] > 1:
            numbers = numbers.narrow(dim, 0, 1)
    return numbers
