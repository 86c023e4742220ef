"""Kernels that call operators themselves see the program's autocast, and conjugates of complex tensors."""

from pathlib import Path

import pytest
import torch

from port_agent import budget
from port_agent.intercept.residency import dispatch_keys
from port_agent.intercept.residency.refusals import UnsupportedError
from tests.agent.intercept.programs import computed, followed

FUSED = """
import sys, torch
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
attention = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
x = torch.randn(8, 16, 64)
with torch.no_grad():
    for on in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            for given in (x, x.bfloat16()) if on else (x,):
                y, z = model(given), attention(given, given, given, need_weights=False)[0]
                print(y.dtype, z.dtype, y.float().sum().item(), z.float().sum().item())
                print(torch.cdist(given.float(), given.float()).sum().item(), torch.is_autocast_enabled("cpu"))
"""


@pytest.mark.process
@pytest.mark.sample(1)
@pytest.mark.parametrize("bound", [("--tensors", "4K"), ("--tensors", "1G")], ids=" ".join)
def test_fused_layers_under_autocast(tmp_path: Path, bound: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(FUSED)
    expected, done = computed("train.py", folder=tmp_path), followed("train.py", folder=tmp_path, bound=bound)
    assert (done.code, done.output, done.said) == (0, expected.output, expected.said)


def test_products_inside_a_pseudoinverse_are_plain_pytorchs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(5, 5, dtype=torch.complex64)
    expected = torch.linalg.pinv(matrix)
    with budget(tensors="64M", page_dir=tmp_path).resizing():
        assert torch.equal(torch.linalg.pinv(matrix), expected)


def test_a_pseudoinverse_under_autocast_is_refused_by_name(tmp_path: Path) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), budget(tensors="64M", page_dir=tmp_path).resizing():
        with pytest.raises(UnsupportedError, match="linalg_pinv under autocast"):
            torch.linalg.pinv(torch.randn(5, 5))
        with torch.autocast("cpu", enabled=False):
            torch.linalg.pinv(torch.randn(5, 5))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_and_bilinear_under_autocast_are_plain_pytorchs(dropout: float, tmp_path: Path) -> None:
    def results() -> list[torch.Tensor]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
        layer = torch.nn.Bilinear(8, 8, 5)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        y = layer(attended.float(), q)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (q, k, v, layer.weight))]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = results()
        with budget(tensors="64M", page_dir=tmp_path).resizing():
            followed = results()
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(expected, followed, strict=True))


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
    dispatch_keys.start()
    assert bool(dispatch_keys.hidden_keys("aten::mm", args)) is needed


@pytest.mark.slow
@pytest.mark.parametrize("tensors", ["4K", "8M", "64M"], ids=["in chunks", "one by one", "whole"])
@pytest.mark.parametrize("foreach", [True, False])
def test_autograd_knows_what_an_optimizer_changed(foreach: bool, tensors: str, tmp_path: Path) -> None:
    """`_foreach_` operators leave it to those that they call to count what is written."""
    with budget(tensors=tensors, page_dir=tmp_path).resizing():
        weight = torch.nn.Parameter(torch.ones(3 << 20))
        optimizer = torch.optim.SGD([weight], lr=0.1, foreach=foreach)
        loss = (weight * weight).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        assert weight._version == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
