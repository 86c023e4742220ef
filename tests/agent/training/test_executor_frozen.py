"""With some parameters frozen, as `plan --sparse-update` leaves them, the numbers are still plain PyTorch's."""

from pathlib import Path

import pytest
import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.ir.plan import Plan
from tests.agent.exactness import OPTIMIZERS, differences, plain, planned, random_plan
from tests.planner.residual_network import Residual, classify, sets


def batches(count: int) -> list[tuple[torch.Tensor, ...]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 12, 12, generator=g), torch.randint(0, 10, (4,), generator=g)) for _ in range(count)]


def frozen(trained: frozenset[str]) -> nn.Module:
    torch.manual_seed(0)
    model = Residual()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return model


BIASES = frozenset({"stem.bias", "body.bias", "head.bias"})


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(
    "trained",
    [BIASES, frozenset({"body.weight", "stem.bias"}), *sets(3)],
    ids=lambda trained: "+".join(sorted(trained)),
)
def test_frozen_parameters(trained: frozenset[str], optimizer: str, tmp_path: Path) -> None:
    model, make = frozen(trained), OPTIMIZERS[optimizer]
    expected = plain(model, classify, make, batches(3))
    capture = capture_step(model, classify, make(model.parameters()), batches(1)[0])
    for plan in (Plan(), random_plan(capture.graphs["step"], 2)):
        actual = planned(capture, {"step": plan}, batches(3), tmp_path / plan.strategy / str(len(plan.decisions)))
        assert not differences(expected, actual)


@pytest.mark.slow
def test_tied_weights_with_clipping(tmp_path: Path) -> None:
    # the tied weight's gradient is a sum that overwrites a summand; clipping must scale the sum
    model, make = Residual(), OPTIMIZERS["sgd"]
    expected = plain(model, classify, make, batches(3), clip=0.1)
    capture = capture_step(model, classify, make(model.parameters()), batches(1)[0], clip_grad_norm=0.1)
    actual = planned(capture, {"step": Plan()}, batches(3), tmp_path)
    assert not differences(expected, actual)
