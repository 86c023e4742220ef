"""Singular values and eigenvalues that nobody differentiates have the bits of plain PyTorch, which
computes no vectors for them.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from port_agent import budget

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "svdvals": torch.linalg.svdvals,
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x @ x.T),
    "eigvals": lambda x: torch.linalg.eigvals(x).abs(),
    "cond": torch.linalg.cond,
    "spectral norm": lambda x: torch.linalg.matrix_norm(x, 2),
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "rank": lambda x: torch.linalg.matrix_rank(x, hermitian=True),
}
MODES = {"": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_have_the_bits_of_plain_pytorch(function: str, mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 40)
    with MODES[mode]():
        expected = FUNCTIONS[function](x)
        with budget(tensors="1K", page_dir=tmp_path).resizing():
            followed = FUNCTIONS[function](x)
            weight = FUNCTIONS[function](x.requires_grad_(mode == "no_grad"))
    assert torch.equal(followed, expected)
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("function", ["svdvals", "eigvalsh", "eigvals"])
def test_gradients_are_plain_pytorchs(function: str, tmp_path: Path) -> None:
    def gradient() -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(16, 16, requires_grad=True)
        FUNCTIONS[function](x).sum().backward()
        assert x.grad is not None
        return x.grad

    expected = gradient()
    with budget(tensors="1K", page_dir=tmp_path).resizing():
        assert torch.equal(gradient(), expected)


def test_after_the_budget_they_are_torchs_own(tmp_path: Path) -> None:
    with budget(tensors="64M", page_dir=tmp_path).resizing():
        pass
    assert "values_alone" not in torch._C._dispatch_dump("aten::linalg_svdvals")
    assert torch.linalg.svdvals(torch.eye(3, requires_grad=True)).requires_grad
