"""Every optimizer that a bundle may name can be described, built again and asked for its scalars."""

import pytest
import torch

from planner.ir.errors import CaptureError
from planner.ir.lowering.optimizer_scalars import OptimizerSpec, StepScalars, build_optimizer, describe_optimizer
from planner.ir.operators import OPTIMIZERS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_named_optimizers_are_supported(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    spec = describe_optimizer(getattr(torch.optim, name)([parameter], lr=0.25))
    assert spec.name == name and type(build_optimizer(spec, [[parameter]])).__name__ == name
    scalars = StepScalars(spec)
    assert any(abs(number) == 0.25 for number in [*scalars.advance(), *scalars.advance()]) or name.startswith("Adam")
    assert scalars.steps_done == 2


def test_others_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="Rprop is not supported; use one of SGD, Adam"):
        describe_optimizer(torch.optim.Rprop([torch.nn.Parameter(torch.ones(1))]))
    with pytest.raises(CaptureError, match="'Lion' is not supported"):
        StepScalars(OptimizerSpec("Lion", ({"lr": 0.1},)))
