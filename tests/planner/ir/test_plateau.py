"""Rates at a plateau are those of torch's own scheduler, float for float, also after a resume."""

import itertools
import random
from typing import Any, Literal

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from port_planner.ir.plateau import PlateauState
from port_planner.job import TrainingJob
from port_planner.schedules import plateau_of

MODES: tuple[Literal["min", "max"], ...] = ("min", "max")
AGAINST: tuple[Literal["rel", "abs"], ...] = ("rel", "abs")


@pytest.mark.parametrize(("mode", "against"), [*itertools.product(MODES, AGAINST)])
def test_it_is_torchs_own_to_the_bit(mode: Literal["min", "max"], against: Literal["rel", "abs"]) -> None:
    draw = random.Random(f"{mode} {against}")
    for _ in range(50):
        settings: dict[str, Any] = {
            "factor": draw.uniform(0.1, 0.9), "patience": draw.randrange(4), "cooldown": draw.randrange(3),
            "threshold": draw.choice([0.0, 1e-4, 0.3]), "eps": draw.choice([1e-8, 1e-3]), "min_lr": [draw.choice([0.0, 0.02]), 1e-3],
        }  # fmt: skip
        weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        groups: list[dict[str, Any]] = [{"params": weights[:1], "lr": 0.1}, {"params": weights[1:]}]
        optimizer = torch.optim.SGD(groups, lr=0.3)
        theirs = ReduceLROnPlateau(optimizer, mode, threshold_mode=against, **settings)
        job = TrainingJob(torch.nn.ParameterList(weights), lambda model: 0, optimizer, [], 1, scheduler=theirs)
        rule = plateau_of(job)
        assert rule is not None
        ours = PlateauState(rule, [0.1, 0.3])
        for _ in range(40):
            losses = [draw.gauss(1.0, 0.2) for _ in range(3)]
            theirs.step(sum(losses) / len(losses))
            for loss in losses:
                ours.batch_done(loss)
                again = PlateauState(rule, [9.0, 9.0])
                again.restore(ours.values())
                ours = again
            ours.epoch_done()
            assert ours.rates == [group["lr"] for group in optimizer.param_groups]
