"""Numbers whose sums cancel: what is left of them is what rounding left, and shows in which order they were added."""

import pytest
import torch
from torch.nn import functional as F

from port_planner.exactness.cancelling import RESIDUE, cancel, mirrored
from port_planner.operators import operator_of

LEFT = 1e-5
"""Of sums of numbers about 1: more than rounding in 32 bits leaves."""


def test_sums_of_mirrored_numbers_are_what_rounding_leaves() -> None:
    rows, columns = mirrored(torch.randn(4, 1001), 1, 1), mirrored(torch.randn(1001, 3), 0, -1)
    assert torch.equal(rows[:, :500], rows[:, 500:1000].flip(1)) and not rows[:, 1000].any()
    assert torch.equal(columns[:500], -columns[500:1000].flip(0))
    assert float((rows.double() @ columns.double()).abs().max()) < 1e-10


def added(terms: torch.Tensor) -> torch.Tensor:
    """Return the sum over the middle dimension, one after the other in single precision."""
    total = torch.zeros_like(terms[:, 0])
    for term in terms.unbind(1):
        total = total + term
    return total


def test_mirrored_numbers_tell_orders_apart_that_half_precision_hides() -> None:
    torch.manual_seed(0)
    rows, columns = torch.randn(16, 600).bfloat16(), torch.randn(600, 16).bfloat16()

    def apart() -> int:
        """Count the sums in half precision that differ where two are added up side by side."""
        terms = rows.float()[:, :, None] * columns.float()[None]
        two = added(terms[:, ::2]) + added(terms[:, 1::2])
        return int((added(terms).bfloat16() != two.bfloat16()).sum())

    hidden = apart()
    mirrored(rows, 1, 1)
    mirrored(columns, 0, -1)
    assert hidden < 10 < 100 < apart()


def test_halves_that_are_added_up_for_themselves_leave_a_trace() -> None:
    torch.manual_seed(0)
    terms = mirrored(torch.randn(16, 600), 1, 1)[:, :, None] * mirrored(torch.randn(600, 16), 0, -1)[None]
    assert int((added(terms[:, :300]) + added(terms[:, 300:])).count_nonzero()) > 200


def cancelled(name: str, *numbers: torch.Tensor) -> dict[int, torch.Tensor]:
    found = dict(enumerate(numbers))
    product = operator_of(name).product
    assert product is not None
    cancel(product, found)
    return found


@pytest.mark.parametrize("inner", [64, 63])
def test_all_sums_of_a_product_cancel_and_its_addend_does_not_hide_what_is_left(inner: int) -> None:
    torch.manual_seed(0)
    a, b = cancelled("mm", torch.randn(8, inner), torch.randn(6, inner).t()).values()
    batches = cancelled("bmm", torch.randn(3, 8, inner), torch.randn(inner, 6).expand(3, inner, 6))
    bias, c, d = cancelled("addmm", torch.ones(6), torch.randn(8, inner), torch.randn(inner, 6)).values()
    for result in (a @ b, batches[0] @ batches[1], c @ d):
        assert 0 < float(result.abs().max()) < LEFT
    assert torch.equal(bias, torch.full((6,), RESIDUE))


@pytest.mark.parametrize(("channels", "groups"), [(8, 1), (3, 1), (8, 2)])
def test_all_sums_of_a_convolution_cancel(channels: int, groups: int) -> None:
    torch.manual_seed(0)
    shapes = (4, channels, 9, 9), (6, channels // groups, 3, 3)
    image, weight = cancelled("convolution", *map(torch.randn, shapes)).values()
    assert 0 < float(F.conv2d(image, weight, groups=groups).abs().max()) < LEFT


def test_both_sums_of_a_convolutions_gradients_cancel() -> None:
    torch.manual_seed(0)
    gradient, image, weight = cancelled(
        "convolution_backward", torch.randn(4, 6, 7, 7), torch.randn(4, 8, 9, 9), torch.randn(6, 8, 3, 3)
    ).values()
    of_image, of_weight, _ = torch.ops.aten.convolution_backward(
        gradient, image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    for result in (of_image, of_weight):
        assert 0 < float(result.abs().max()) < LEFT
