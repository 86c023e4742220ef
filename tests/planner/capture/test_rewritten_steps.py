"""Steps that are written again without reading numbers off tensors: torch's own, to the bit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from port_planner.capture.recorder import StepRecorder
from port_planner.capture.rewritten_steps import rewritten_step

STEPS = 6
SHAPES = ((5, 7), (3, 2, 4, 6), (9,), (1,), (), (64, 33))


class Adding(StepRecorder):
    """Does what it would record."""

    def add_scaled(self, target: torch.Tensor, other: torch.Tensor, factor: torch.Tensor) -> None:
        target.add_(other, alpha=factor.item())


def optimizers(cls: Any, options: dict[str, Any], dtype: torch.dtype) -> Iterator[torch.optim.Optimizer]:
    for _ in range(2):
        torch.manual_seed(0)
        yield cls([torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES], **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.Adafactor, {}),
        (torch.optim.Adafactor, {"lr": 2.0, "weight_decay": 0.1, "beta2_decay": -0.5, "d": 1.5}),
        (torch.optim.Adafactor, {"eps": (1e-4, 0.5), "maximize": True}),
        (torch.optim.ASGD, {}),
        (torch.optim.ASGD, {"t0": 1, "lambd": 0.1, "alpha": 0.5, "weight_decay": 0.2, "maximize": True}),
    ],
)
def test_weights_and_states_are_torchs(cls: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    own, again = optimizers(cls, options, dtype)
    step = rewritten_step(again)
    assert step is not None and rewritten_step(torch.optim.SGD([torch.ones(1)])) is None
    for i in range(STEPS):
        for optimizer in (own, again):
            torch.manual_seed(i + 1)
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.randn(parameter.shape).to(dtype) * (10.0 if i == 2 else 0.1)
        own.step()
        step(again, Adding())
    pairs = zip(own.param_groups[0]["params"], again.param_groups[0]["params"], strict=True)
    for mine, theirs in pairs:
        assert torch.equal(mine, theirs)
        states = {k: v for k, v in own.state[mine].items() if k not in ("step", "eta", "mu")}
        assert states.keys() == {k for k, v in again.state[theirs].items() if isinstance(v, torch.Tensor)}
        assert all(torch.equal(value, again.state[theirs][name]) for name, value in states.items())
        assert all(
            float(own.state[mine][k]) == again.state[theirs][k] for k in ("step", "eta", "mu") if k in own.state[mine]
        )
