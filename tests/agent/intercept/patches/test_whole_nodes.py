"""Gradients that take another formula under a dispatch mode have plain PyTorch's bits while operators are followed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from port_agent import budget
from port_agent.intercept.residency.refusals import UnsupportedError

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: x.prod(),
    "prod of rows": lambda x: torch.prod(x, 1),
    "cumprod": lambda x: x.cumprod(0),
    "masked_fill": lambda x: torch.zeros(64, 64).masked_fill(torch.arange(64) % 3 > 0, x.sum()) * x,
    "det": lambda x: torch.linalg.det(x * (torch.arange(64) > 0)),
    "vander": lambda x: torch.linalg.vander(x[:, 0], N=4),
    "ormqr": lambda x: torch.ormqr(x[:5, :5], x[0, :5], x[:5, :5]),
}


def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the function's value and its gradients of first and second order."""
    torch.manual_seed(0)
    x = (torch.rand(64, 64) + 0.5).requires_grad_()
    y = function(x)
    weights = torch.randn_like(y)
    (once,) = torch.autograd.grad(y, x, weights, retain_graph=True)
    (first,) = torch.autograd.grad(y, x, weights, create_graph=True)
    (second,) = torch.autograd.grad(first, x, torch.randn_like(first), allow_unused=True)
    return [t.detach().clone() for t in (y, once, first, second) if t is not None]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("tensors", ["64M", "4K"])
def test_gradients_have_the_bits_of_plain_pytorch(function: str, tensors: str, tmp_path: Path) -> None:
    expected = gradients(FUNCTIONS[function])
    with budget(tensors=tensors, page_dir=tmp_path).resizing():
        followed = gradients(FUNCTIONS[function])
    assert all(torch.equal(a, b) for a, b in zip(expected, followed, strict=True))


def test_a_node_that_fails_leaves_everything_in_place(tmp_path: Path) -> None:
    with budget(tensors="64M", page_dir=tmp_path).resizing() as b:
        vectors = torch.linalg.eig(torch.rand(8, 8, requires_grad=True)).eigenvectors
        with pytest.raises(RuntimeError, match="ill-defined"):
            vectors.backward(torch.randn(8, 8, dtype=torch.complex64))
        operators = b.interceptor.operators
        torch.ones(8).add(1)
        assert b.interceptor.operators == operators + 2
        assert all(storage.pins == 0 for storage in b.interceptor.table)


def test_a_mode_of_the_programs_own_has_the_formulas_of_a_mode(tmp_path: Path) -> None:
    with FlopCounterMode(display=False):
        expected = gradients(FUNCTIONS["prod of rows"])
    with budget(tensors="64M", page_dir=tmp_path).resizing(), FlopCounterMode(display=False):
        followed = gradients(FUNCTIONS["prod of rows"])
    assert all(torch.equal(a, b) for a, b in zip(expected, followed, strict=True))
    assert not torch.equal(expected[1], gradients(FUNCTIONS["prod of rows"])[1])


def test_hooked_saved_tensors_are_refused_by_name(tmp_path: Path) -> None:
    x = torch.rand(4, 8, requires_grad=True)
    with budget(tensors="64M", page_dir=tmp_path).resizing():
        y = checkpoint(lambda x: x.sin().prod(1), x, use_reentrant=False)
        with pytest.raises(UnsupportedError, match=r"ProdBackward1 .*checkpoint"):
            y.sum().backward()


WITH_TORCH_FUNC: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: func.grad(lambda q: f(q).sum())(x),
    "of each row": lambda f, x: func.vmap(func.grad(lambda q: f(q).sum()))(torch.stack([x, x / 3])),
    "vjp": lambda f, x: func.vjp(f, x)[1](torch.ones_like(f(x)))[0],
    "hessian": lambda f, x: func.hessian(lambda q: f(q).sum())(x[:4, :4]),
}


@pytest.mark.parametrize("way", WITH_TORCH_FUNC)
@pytest.mark.parametrize("function", ["prod", "prod of rows", "cumprod"])
def test_what_torch_func_wraps_has_the_bits_of_plain_pytorch(way: str, function: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.rand(16, 16) + 0.5
    expected = WITH_TORCH_FUNC[way](FUNCTIONS[function], x)
    with budget(tensors="1K", page_dir=tmp_path).resizing():
        followed = WITH_TORCH_FUNC[way](FUNCTIONS[function], x)
    assert torch.equal(expected, followed)


def test_gradients_in_a_batch_are_refused_by_name(tmp_path: Path) -> None:
    x = torch.rand(4, 8, requires_grad=True)
    with budget(tensors="64M", page_dir=tmp_path).resizing():
        y = x.cumprod(1)
        with pytest.raises(UnsupportedError, match=r"CumprodBackward0 for a batch of gradients"):
            torch.autograd.grad(y, x, torch.ones(3, 4, 8), is_grads_batched=True)


def test_tangents_of_gradients_are_there_when_a_node_runs_whole(tmp_path: Path) -> None:
    def forward_over_reverse() -> Tensor:
        torch.manual_seed(0)
        x, direction = torch.rand(16, 16, requires_grad=True), torch.randn(16, 16)
        with forward_ad.dual_level():
            y = forward_ad.make_dual(x, direction).cumprod(0)
            torch.ones(300, 300) @ torch.ones(300, 300)
            (gradient,) = torch.autograd.grad(y, x, torch.ones_like(x))
            tangent = forward_ad.unpack_dual(gradient).tangent
            assert tangent is not None
            return tangent.clone()

    expected = forward_over_reverse()
    with budget(tensors="1K", page_dir=tmp_path).resizing():
        assert torch.equal(forward_over_reverse(), expected)
