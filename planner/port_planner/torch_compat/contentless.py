"""Tensors that have shapes and no contents: whose code runs on them shows which operators it calls, and takes neither time nor memory for them."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from port_planner.torch_compat.parts import require, use_part


def without_contents() -> AbstractContextManager[Any]:
    """Return a mode in which operators give tensors without contents, of those that have some, too, which stay as they are."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def has_contents(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made outside of `without_contents`."""
    return not isinstance(tensor, FakeTensor)


def _operators_do_nothing() -> None:
    kept = torch.ones(2)
    with without_contents():
        made = kept.add_(1) * 2
    require(not has_contents(made) and kept.tolist() == [1.0, 1.0], "operators compute under FakeTensorMode")


use_part(
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "shows what later steps run without running it",
    "plan does not say for how many updates the operators stay the same",
    _operators_do_nothing,
)
