"""Kernels that call operators with conjugates of complex tensors compute what they compute without a mode."""

from pathlib import Path

import pytest
import torch

from agent import budget
from agent.follow.patches import conjugation


def complex_matrix() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(5, 5, dtype=torch.complex64)


def test_a_pseudoinverse_is_plain_pytorchs(tmp_path: Path) -> None:
    expected = torch.linalg.pinv(complex_matrix())
    with budget(tensors="64M", page_dir=tmp_path):
        followed = torch.linalg.pinv(complex_matrix())
    assert torch.equal(followed, expected)


@pytest.mark.parametrize(
    ("args", "needed"),
    [
        ((torch.ones(2), 1, [0, 1], None), False),
        ((torch.ones(2), torch.ones(2, dtype=torch.complex64)), True),
        (([torch.ones(2, dtype=torch.complex64)],), True),
        ((torch.nn.Parameter(torch.ones(2, dtype=torch.complex128)),), True),
    ],
)
def test_complex_operands_need_it(args: tuple[object, ...], needed: bool) -> None:
    assert conjugation.is_needed(args) is needed
