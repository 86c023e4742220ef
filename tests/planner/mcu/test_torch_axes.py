"""Views as torch does them, on tensors whose values are their own places."""

import itertools

import pytest
import torch

from port_planner.mcu.ir import Shape
from port_planner.mcu.torch_axes import TorchAxes

SHAPES = [Shape(2, 3, 4), Shape(1, 3, 4), Shape(2, 1, 4), Shape(2, 3, 1), Shape(1, 1, 4)]


def numbered(shape: Shape) -> torch.Tensor:
    return torch.arange(2 * shape.elements).reshape(2, shape.channels, shape.height, shape.width)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_permuting_and_reshaping_are_those_of_torch(shape: Shape, order: tuple[int, ...]) -> None:
    graph, seen = numbered(shape), TorchAxes.of(shape, "CHW")
    moved = graph.permute(0, *(1 + axis for axis in order))
    axes = seen.permuted(order)
    assert axes.as_torch(graph).equal(moved)
    for extents in (
        (-1,),
        (moved.shape[1], -1),
        (moved.shape[1], 1, -1),
        (-1, moved.shape[3]),
        (1, *moved.shape[1:], 1),
    ):
        viewed = moved.reshape(2, *extents)
        found = axes.reshaped(viewed.shape[1:])
        assert found is not None and found.as_torch(graph).equal(viewed)


def test_a_view_that_divides_an_axis_has_no_name() -> None:
    assert TorchAxes.of(Shape(2, 3, 4), "CHW").reshaped((2, 2, 6)) is None
    assert TorchAxes.of(Shape(2, 3, 4), "CHW").reshaped((4, 2)) is None


def test_an_image_is_channels_and_axes_of_the_data() -> None:
    assert TorchAxes.of(Shape(2, 3, 4), "CHW").image(2) == ("H", "W")
    assert TorchAxes.of(Shape(2, 3, 4), "CWH").image(2) == ("W", "H")
    assert TorchAxes.of(Shape(8, 1, 4), "CH").image(1) == ("H",)
    assert TorchAxes.of(Shape(1, 1, 4), ("C", "")).image(1) == ("W",)
    assert TorchAxes.of(Shape(8, 1, 4), ("C", "", "H")).image(2) == ("W", "H")
    for axes, dimensions in ((("H", "C", "W"), 2), (("C", "HW"), 1), (("CHW",), 0), ("CHW", 1)):
        found = TorchAxes.of(Shape(2, 3, 4), axes).image(dimensions)
        assert found is None
