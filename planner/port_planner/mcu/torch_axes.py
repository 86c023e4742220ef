"""The correspondence between axes of a torch tensor and axes of the compiler's graph, whose tensors are
[height][width][channel].

Views (flatten, squeeze, permute, reshape) move no data on a board. They only change which axis of the graph an axis of
torch means. The next layer that computes reads it from here, or is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from port_planner.mcu.ir import Shape

GRAPH_AXES = "CHW"
"""Axes in torch's order. An axis of the graph is named by one of these letters."""

TorchAxis = str
"""The graph's axes with extents above 1 whose row-major product is an axis of torch; "" for an extent of 1."""


def extent(shape: Shape, axis: TorchAxis) -> int:
    """Return the extent of a product of axes of the graph."""
    return prod({"C": shape.channels, "H": shape.height, "W": shape.width}[name] for name in axis)


@dataclass(frozen=True, slots=True)
class TorchAxes:
    """The axes after the batch of one torch tensor, and the shape of its tensor in the graph."""

    shape: Shape
    axes: tuple[TorchAxis, ...]

    @classmethod
    def of(cls, shape: Shape, axes: Sequence[TorchAxis]) -> TorchAxes:
        """Return the axes without those of extent 1."""
        return cls(shape, tuple("".join(name for name in axis if extent(shape, name) > 1) for axis in axes))

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape that torch sees, without the batch."""
        return tuple(extent(self.shape, axis) for axis in self.axes)

    @property
    def order(self) -> str:
        """All axes of the graph with an extent above 1, outermost first."""
        return "".join(self.axes)

    def reshaped(self, extents: Sequence[int]) -> TorchAxes | None:
        """Return the axes of a view with these extents; None if the view would divide an axis of the graph."""
        left, found = list(self.order), []
        for wanted in extents:
            axis = ""
            while left and extent(self.shape, axis + left[0]) <= wanted:
                axis += left.pop(0)
            if extent(self.shape, axis) != wanted:
                return None
            found.append(axis)
        return None if left else TorchAxes(self.shape, tuple(found))

    def permuted(self, order: Sequence[int]) -> TorchAxes:
        """Return the axes in another order."""
        return TorchAxes(self.shape, tuple(self.axes[index] for index in order))

    def image(self, dimensions: int) -> tuple[str, ...] | None:
        """Return which axes of the graph the last `dimensions` axes are.

        None unless the tensor is channels followed by this many axes, each of which is an axis of the graph.
        """
        if len(self.axes) != dimensions + 1 or self.axes[0] not in ("", "C"):
            return None
        spatial = self.axes[1:]
        if any(axis not in ("", "H", "W") for axis in spatial):
            return None
        unused = [name for name in ("HW" if dimensions == 2 else "WH") if name not in spatial]
        return tuple(axis or unused.pop(0) for axis in spatial)

    def as_torch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the graph, [N, C, H, W], as torch sees it."""
        order = self.order + "".join(name for name in GRAPH_AXES if name not in self.order)
        ordered = tensor.permute(0, *(1 + GRAPH_AXES.index(name) for name in order))
        return ordered.reshape(len(tensor), *self.extents)
