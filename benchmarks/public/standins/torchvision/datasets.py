"""Small made-up pictures, the same in every run."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

_PICTURES = {True: 512, False: 128}


class MNIST(Dataset):  # type: ignore[type-arg]
    """Digits of 28 x 28 bytes, each with a bar where its class is."""

    def __init__(
        self, root: str, train: bool = True, transform: Callable[[Any], Any] | None = None, download: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(int(train))
        count = _PICTURES[train]
        self.targets = torch.arange(count) % 10
        self.data = torch.randint(0, 128, (count, 28, 28), generator=generator, dtype=torch.uint8)
        for picture, target in zip(self.data, self.targets, strict=True):
            picture[2 * int(target) : 2 * int(target) + 4] += 100
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture: Any = self.data[index]
        return (picture if self.transform is None else self.transform(picture)), int(self.targets[index])


class FakeData(Dataset):  # type: ignore[type-arg]
    """Noise of three colours."""

    def __init__(self, image_size: tuple[int, ...], transform: Callable[[Any], Any]) -> None:
        self.data = torch.randint(
            0, 256, (64, *image_size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
        )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.data[index].float() / 255, index % 10
