"""A step that is not the same each time is not recorded: each way to be silently wrong, refused with its line."""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.base.errors import CaptureError
from port_planner.capture.recorder import Tape
from port_planner.capture.rerecord_check import constants_of, require_same
from port_planner.capture.step import Capture, Repetition, capture_evaluation, capture_step

ROWS = 4
DRAWN = torch.Generator().manual_seed(1)
X, Y = torch.randn(3 * ROWS, 4, generator=DRAWN), torch.randint(0, 3, (3 * ROWS,), generator=DRAWN)
BATCHES = [(X[i : i + ROWS], Y[i : i + ROWS]) for i in range(0, 3 * ROWS, ROWS)]

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], Any]


def entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def recorded(model: nn.Module, loss_fn: Loss = entropy, *, evaluation: bool = False) -> Capture:
    """Return what three recordings of the step have in common."""
    if evaluation:
        return capture_evaluation(model, loss_fn, BATCHES[0], repetition=Repetition(BATCHES[1:]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture_step(model, loss_fn, optimizer, BATCHES[0], repetition=Repetition(BATCHES[1:]))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


calls = 0


def counting(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    global calls
    calls += 1
    return entropy(model, x, y) / calls


def alternating(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    global calls
    calls += 1
    return entropy(model, x, y) if calls % 2 else entropy(model, x, y).square()


def numpy_noise(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    noise = np.random.default_rng().normal(size=(ROWS, 4)).astype(np.float32)
    return entropy(model, x + torch.from_numpy(noise), y)


def positive_rows(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = torch.zeros(())
    for row in x[:, 0].numpy() > 0:
        loss = loss + row
    return entropy(model, x, y) * (1 + loss)


class Remembering(nn.Module):
    """Keeps an average that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.average = nn.Linear(4, 3), torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * result.detach().mean(0)
        return result - self.average


class Growing(Remembering):
    """Replaces a buffer by a larger one."""

    def __init__(self) -> None:
        super().__init__()
        del self.average
        self.register_buffer("average", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = torch.cat((self.average, x.detach().mean().view(1)))
        result: torch.Tensor = self.linear(x)
        return result


class Exchanging(Growing):
    """Gives a buffer other memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.data = self.average + x.detach().mean()
        result: torch.Tensor = self.linear(x)
        return result


def without_onednn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    before = torch.backends.mkldnn.set_flags(False, _fp32_precision=None)
    try:
        return entropy(model, x, y)
    finally:
        torch.backends.mkldnn.set_flags(before[0], _fp32_precision=None)


CHANGING: dict[str, tuple[Callable[[], nn.Module], Loss, str]] = {
    "numpy noise": (net, numpy_noise, r"test_rerecord_check.py:\d+: aten::add.Tensor works on different contents"),
    "numpy's generator": (net, lambda m, x, y: entropy(m, x, y) * np.random.rand(), r"draws .* from `numpy.random`"),
    "Python's generator": (
        net, lambda m, x, y: entropy(m, x, y) * (2 if random.random() < 1e-9 else 1), r"draws .* from Python's `random` \(in <lambda>, test_rerecord_check\.py:\d+\)",
    ),
    "counter": (net, counting, r"test_rerecord_check.py:\d+: aten::div.Tensor was called with \d in one recording"),
    "phases": (net, alternating, "ran (where|in one recording)"),
    "clock": (net, lambda m, x, y: entropy(m, x, y) * time.perf_counter(), "aten::mul.Tensor was called with"),
    "through numpy": (
        net, lambda m, x, y: entropy(m, torch.from_numpy(x.numpy() * 2), y), r"test_rerecord_check.py:\d+ reads \d+ numbers of a tensor .*numpy",
    ),
    "values in Python": (net, lambda m, x, y: entropy(m, x, y) * x.tolist()[0][0], r"reads \d+ numbers of a tensor .*tolist"),
    "whole numbers": (net, lambda m, x, y: entropy(m, x, y) * (1 + y.tolist()[0]), r"value is read in Python .*: \d, then \d .*run the model once"),
    "too many": (net, lambda m, x, y: entropy(m, x, y) * len(y.repeat(1000).tolist()), r"reads \d+ numbers of a tensor"),
    "some rows": (net, lambda m, x, y: entropy(m, x[x[:, 0] > X[ROWS, 0]], y[x[:, 0] > X[ROWS, 0]]), "instead of"),
    "numpy decides": (net, positive_rows, r"reads \d+ numbers of a tensor"),
    "attribute": (Remembering, entropy, "that an earlier step created"),
    "memory of a buffer": (Exchanging, entropy, r"test_rerecord_check.py:\d+: the step assigns average.data"),
    "settings for a part": (net, without_onednn, r"test_rerecord_check.py:\d+: .*other settings of torch \(onednn off instead of on\)"),
    "buffer replaced": (Growing, entropy, r"test_rerecord_check.py:92: the step replaces average of the model by other tensors"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGING)
def test_what_changes_from_step_to_step_is_refused(what: str) -> None:
    model, loss_fn, message = CHANGING[what]
    with pytest.raises(CaptureError, match=message) as refused:
        recorded(model(), loss_fn)
    assert "port-agent exec" in str(refused.value)


@pytest.mark.parametrize("what", ["numpy noise", "counter", "through numpy", "buffer replaced"])
def test_so_is_an_evaluation(what: str) -> None:
    model, loss_fn, message = CHANGING[what]
    with pytest.raises(CaptureError, match=message):
        recorded(model(), loss_fn, evaluation=True)


def test_generators_are_as_before() -> None:
    python, arrays = random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]
    with pytest.raises(CaptureError):
        recorded(net(), lambda m, x, y: entropy(m, x, y) * random.random() * np.random.rand())
    assert random.getstate() == python
    assert np.random.get_state(legacy=False)["state"]["pos"] == arrays


STEADY: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "dropout": (net, entropy),
    "torch noise": (net, lambda m, x, y: entropy(m, x + torch.randn_like(x), y)),
    "masked rows": (net, lambda m, x, y: (functional.cross_entropy(m(x), y, reduction="none") * (x[:, 0] > 0)).mean()),
    "classes spread out": (
        net,
        lambda m, x, y: (m(x) * functional.one_hot((99 * x[:, :3]).abs().long(), 999).sum(-1)).mean(),
    ),
}


@pytest.mark.parametrize("what", STEADY)
def test_what_torch_varies_is_no_change(what: str) -> None:
    model, loss_fn = STEADY[what]
    assert recorded(model(), loss_fn).constants == ()


def test_constants_are_named_with_where_they_are_read() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])
    capture = recorded(net(), lambda m, x, y: functional.cross_entropy(m(x), y, weight=weights))
    (named,) = capture.constants
    assert named.startswith("float32 [3] read by aten::nll_loss_forward at test_rerecord_check.py:")


def test_an_empty_tape_has_nothing_constant() -> None:
    require_same(Tape(), Tape())
    assert constants_of(Tape()) == ()
