"""The dispatch mode alone: where its mere presence would change bits, and what it refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agent import budget
from agent.follow.mode import NotFollowedError

LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "rnn": lambda: torch.nn.RNN(24, 24, batch_first=True),
    "gru": lambda: torch.nn.GRU(24, 24, batch_first=True),
    "lstm": lambda: torch.nn.LSTM(24, 24, batch_first=True),
    "attention": lambda: torch.nn.TransformerEncoderLayer(24, 4, 48, batch_first=True),
}


@pytest.mark.parametrize("layer", list(LAYERS))
@pytest.mark.parametrize("limit", ["4K", "1G"])
def test_inference_mode_has_the_bits_of_plain_pytorch(layer: str, limit: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = LAYERS[layer]().eval(), torch.randn(3, 4, 24)
    with torch.inference_mode():
        plain = module(x)
        with budget(tensors=limit, page_dir=tmp_path):
            followed = module(x)
    plain, followed = (out[0] if isinstance(out, tuple) else out for out in (plain, followed))
    assert torch.equal(plain, followed)


def test_a_gradient_of_other_bits_is_refused_by_name(tmp_path: Path) -> None:
    x = torch.rand(4, 8, requires_grad=True)
    with budget(tensors="1G", page_dir=tmp_path):
        with torch.no_grad():
            x.prod(1)
        with pytest.raises(NotFollowedError, match="prod"):
            x.prod(1)
