"""Tensors that have shapes and no contents: whose code runs on them shows which operators it calls, and takes neither time nor memory for them."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from port_planner.torch_compat.tensors import FakeTensor, FakeTensorMode


def without_contents() -> AbstractContextManager[Any]:
    """Return a mode in which operators give tensors without contents. What has some keeps them, but for what writes in its place."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def has_contents(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made outside of `without_contents`."""
    return not isinstance(tensor, FakeTensor)
