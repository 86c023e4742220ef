"""Each function of torch's own database of operators that has a gradient, trained through as a program and as a job."""

import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.follow_zoo.bundles import STEPS, BundleCase, trained
from benchmarks.follow_zoo.children import Case
from benchmarks.follow_zoo.compare import ALL_SETTINGS, training_begins
from port_planner.job import TrainingJob

_SAMPLES = 4
"""Samples of a function's arguments, in each step."""
_ROWS = 2


def torch_functions() -> list[Any]:
    """Return torch's own descriptions of its functions (`OpInfo`), each with samples of their arguments."""
    if "expecttest" not in sys.modules:  # a test library of torch's own, of which it wants a base class
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with mock.patch.object(
        torch.backends, "disable_global_flags"
    ):  # which is called as it loads, for the whole process
        from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def cases() -> Iterator[Case]:
    """Give one program for each function."""
    for info in _with_gradient():
        yield Case(_name(info), partial(_trained, info), ALL_SETTINGS)


def job_cases() -> Iterator[BundleCase]:
    """Give one job for each function."""
    for info in _with_gradient():
        yield BundleCase(_name(info), partial(_job, info))


def _with_gradient() -> Iterator[Any]:
    for info in torch_functions():
        if info.supports_autograd and torch.float32 in info.supported_dtypes("cpu"):
            yield info


def _name(info: Any) -> str:
    return f"operator/{info.formatted_name}"


class _Calls(nn.Module):
    """Calls a function with its samples: tensors with a gradient are its parameters, others its buffers."""

    def __init__(self, info: Any) -> None:
        super().__init__()
        warnings.simplefilter("ignore")
        self.function = info.op
        self.calls: list[tuple[list[Any], pytree.TreeSpec]] = []
        for sample in info.sample_inputs("cpu", torch.float32, requires_grad=True):
            leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
            if len(self.calls) < _SAMPLES and self._is_trained(leaves, spec):
                self.calls.append(([self._kept(leaf) for leaf in leaves], spec))

    def _is_trained(self, leaves: list[Any], spec: pytree.TreeSpec) -> bool:
        """Return whether a call works as it is and its result has a gradient."""
        args, kwargs = pytree.tree_unflatten([t.detach().requires_grad_() if _trains(t) else t for t in leaves], spec)
        try:
            return any(_trains(t) for t in pytree.tree_leaves(self.function(*args, **kwargs)))
        except (RuntimeError, ValueError, TypeError):  # a sample that is not for this machine
            return False

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = f"t{len(self._parameters) + len(self._buffers)}"
        if _trains(leaf):
            self.register_parameter(name, nn.Parameter(leaf.detach().clone()))
        else:
            self.register_buffer(name, leaf.detach().clone())
        return _Kept(name)

    def forward(self, scale: Tensor) -> Tensor:
        """Return the mean square of all results, scaled by the batch."""
        total = scale.new_zeros(())
        for leaves, spec in self.calls:
            args, kwargs = pytree.tree_unflatten(
                [getattr(self, leaf) if isinstance(leaf, _Kept) else leaf for leaf in leaves], spec
            )
            for result in pytree.tree_leaves(self.function(*args, **kwargs)):
                if isinstance(result, Tensor) and result.numel():
                    number = torch.view_as_real(result) if result.is_complex() else result
                    total = total + number.to(scale.dtype).square().mean() * scale.mean()
        return total


class _Kept(str):
    """The name of a parameter or buffer in place of a tensor."""

    __slots__ = ()


def _trains(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _job(info: Any) -> TrainingJob:
    model = _Calls(info)
    parameters = [*model.parameters()]
    if not parameters:
        raise ValueError("no sample has a gradient")
    data = [torch.rand(STEPS * _ROWS, 1) + 0.5]
    return TrainingJob(
        model,
        lambda model, scale: model(scale),
        torch.optim.SGD(parameters, lr=1e-3),
        data,
        _ROWS,
        allow_nonfinite=True,
        name=info.name,
    )


def _trained(info: Any) -> Any:
    job = _job(info)
    training_begins()
    return trained(job, STEPS)
