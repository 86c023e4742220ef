"""Tangents of operators whose formulas ask for a dispatch mode are refused by name; all else in forward
mode is as in plain PyTorch.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from port_agent import budget
from port_agent.intercept.residency.refusals import UnsupportedError

DIFFERING: dict[str, Callable[[Tensor], Tensor]] = {
    "native_layer_norm": nn.LayerNorm(6),
    "native_group_norm": nn.GroupNorm(2, 6),
    "native_batch_norm": nn.BatchNorm1d(6, track_running_stats=False),
    "prod": lambda x: x.prod(1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERING)
def test_tangents_with_other_last_digits_are_refused_by_name(name: str, tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    with budget(tensors="64M", page_dir=tmp_path).resizing(), forward_ad.dual_level():
        DIFFERING[name](x)
        with pytest.raises(UnsupportedError, match=f"the tangent of aten::{name}"):
            DIFFERING[name](forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("name", DIFFERING)
def test_tangents_inside_of_torch_func_have_the_bits_of_plain_pytorch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, direction = torch.randn(4, 6), torch.randn(4, 6)
    expected = torch.func.jvp(DIFFERING[name], (x,), (direction,))
    with budget(tensors="1K", page_dir=tmp_path).resizing():
        followed = torch.func.jvp(DIFFERING[name], (x,), (direction,))
    assert all(torch.equal(a, b) for a, b in zip(expected, followed, strict=True))


def test_what_was_made_in_inference_mode_has_no_tangent(tmp_path: Path) -> None:
    with torch.inference_mode():
        x = torch.randn(4, 6)
    with budget(tensors="64M", page_dir=tmp_path).resizing(), torch.no_grad(), forward_ad.dual_level():
        assert torch.isfinite(nn.functional.layer_norm(x, (6,))).all()
