"""Autograd functions of a program: the budget of a GPU wraps their calls and leaves them as they were; a GPU's tensors
in `test_pointer_guards`.
"""

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, Function

from port_agent import budget
from port_planner.torch_compat.autograd import SAVED_TENSORS


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_functions_of_a_program_on_the_host_run_as_they_are_and_are_put_back() -> None:
    before = vars(Function)["apply"], vars(BackwardCFunction)["apply"]
    x = torch.arange(4000.0, requires_grad=True)
    with budget(gpu_tensors="4K"):
        assert vars(Function)["apply"] is not before[0]
        _Square.apply(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())
    assert (vars(Function)["apply"], vars(BackwardCFunction)["apply"]) == before
    assert SAVED_TENSORS not in vars(BackwardCFunction)
