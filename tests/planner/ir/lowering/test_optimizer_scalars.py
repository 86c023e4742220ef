"""Every optimizer that a bundle may name can be described, built again and asked for its scalars."""

from typing import Any

import pytest
import torch

from port_planner.base.errors import CaptureError
from port_planner.ir.allowed_operators import OPTIMIZERS
from port_planner.ir.lowering.optimizer_scalars import OptimizerSpec, StepScalars, build_optimizer, describe_optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_named_optimizers_are_supported(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    spec = describe_optimizer(getattr(torch.optim, name)([parameter], lr=0.25))
    assert spec.name == name and type(build_optimizer(spec, [[parameter]])).__name__ == name
    scalars = StepScalars(spec)
    numbers = [*scalars.advance(), *scalars.advance()]
    assert any(abs(number) == 0.25 for number in numbers) or name.startswith(("Adam", "NAdam"))
    assert scalars.steps_done == 2


def test_others_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="Rprop is not supported; use one of SGD, Adam"):
        describe_optimizer(torch.optim.Rprop([torch.nn.Parameter(torch.ones(1))]))
    with pytest.raises(CaptureError, match="'Lion' is not supported"):
        StepScalars(OptimizerSpec("Lion", ({"lr": 0.1},)))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("done", [1, 5, 700])
def test_a_resume_gives_the_numbers_that_were_to_come(name: str, done: int) -> None:
    """NAdam's are of a product over all updates before, of which each saw another momentum."""
    group: dict[str, Any] = {"lr": 0.25}
    spec = describe_optimizer(getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(3))], **group))
    betas = "betas" in spec.groups[0]
    schedule = [[{"lr": 0.1 / (i + 1), **({"betas": [0.9 + i / 1e4, 0.99]} if betas else {})}] for i in range(701)]
    through, resumed = StepScalars(spec, schedule), StepScalars(spec, schedule)
    for _ in range(done):
        through.advance()
    resumed.steps_done = done
    first = resumed.advance()
    assert first == through.advance() and first != StepScalars(spec, schedule).advance()
    resumed.steps_done = 0  # back to an older commit
    assert resumed.advance() == StepScalars(spec, schedule).advance()


def test_beyond_its_schedule_nothing_is_known() -> None:
    scalars = StepScalars(
        describe_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)), [[{"lr": 0.5}]]
    )
    assert -0.5 in scalars.advance()
    with pytest.raises(CaptureError, match="known for 1 updates, but this is update 2"):
        scalars.advance()


@pytest.mark.parametrize(("name", "options"), [("Adam", {}), ("SGD", {"momentum": 0.9, "dampening": 0.5})])
def test_an_optimizer_whose_count_has_begun_is_refused(name: str, options: dict[str, float]) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **options)
    for _ in range(2):
        parameter.grad = torch.ones(3)
        optimizer.step()
    with pytest.raises(CaptureError, match=f"the optimizer {name} has made (2|some) steps"):
        describe_optimizer(optimizer)


_OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "AdamW": {"amsgrad": True},
}
"""Of optimizers whose defaults leave operators out."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"), [*((name, _OPTIONS.get(name, {})) for name in OPTIMIZERS), ("SGD", {}), ("RMSprop", {})]
)
def test_an_update_in_lists_has_the_numbers_of_the_plain_one_or_is_refused(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    def trained(*, foreach: bool) -> tuple[torch.optim.Optimizer, torch.Tensor]:
        drawn = torch.Generator().manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(1000, generator=drawn).to(dtype))
        optimizer = getattr(torch.optim, name)([parameter], lr=0.01, weight_decay=0.1, foreach=foreach, **options)
        for _ in range(8):
            parameter.grad = torch.randn(1000, generator=drawn).to(dtype)
            optimizer.step()
        optimizer.state.clear()
        return optimizer, parameter.detach()

    (in_lists, found), (_, plain) = trained(foreach=True), trained(foreach=False)
    if torch.equal(found, plain):
        assert describe_optimizer(in_lists).name == name
    else:
        with pytest.raises(CaptureError, match=f"{name} was made with foreach=True.*make it with foreach=False"):
            describe_optimizer(in_lists)
