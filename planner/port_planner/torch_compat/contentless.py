"""Tensors with shapes but no contents: code that runs on them shows which operators it calls, at almost no cost."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from port_planner.torch_compat.tensors import FakeTensor, FakeTensorMode


def without_contents() -> AbstractContextManager[Any]:
    """Return a mode in which operators return tensors without contents. Existing contents stay, unless overwritten."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def emptied(tensor: torch.Tensor, mode: Any) -> torch.Tensor:
    """Return the tensor that replaces one with contents under such a `mode`, or the tensor
    itself if it has no contents.
    """
    found: torch.Tensor = mode.from_tensor(tensor) if has_contents(tensor) else tensor
    return found


def has_contents(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was created outside `without_contents`."""
    return not isinstance(tensor, FakeTensor)
