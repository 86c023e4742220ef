"""Transforms of bytes to the numbers that networks are fed with."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Compose:
    """Some, one after another."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, picture: Any) -> Any:
        for transform in self.transforms:
            picture = transform(picture)
        return picture


class ToTensor:
    """Bytes as numbers from 0 to 1, a channel first."""

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return picture[None].float() / 255


class Normalize:
    """To a mean and a deviation of each channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return (picture - self.mean) / self.std


class Lambda:
    """Any function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, picture: Any) -> Any:
        return self.function(picture)
