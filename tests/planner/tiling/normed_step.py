"""A small convolutional network's step: a batch norm whose gradient a shortcut reads again, and one whose
gradient nothing else reads.
"""

import torch
from torch import nn
from torch.nn import functional

CHANNELS = 48


class Normed(nn.Module):
    """Two convolutions with their norms and a shortcut: one norm's gradient is read again, the other's is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, CHANNELS, 3), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(h + self.norms[1](self.second(h))).mean((2, 3))


def normed_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 22, 22, generator=generator), torch.randint(0, CHANNELS, (4,), generator=generator)


def normed_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss."""
    return functional.cross_entropy(model(x), y)


def normed() -> Normed:
    """Return the model from a fixed seed."""
    torch.manual_seed(0)
    return Normed()
