"""Pruning while training: the share asked for, the numbers of the same loop in plain PyTorch, the same after a kill."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from port_agent.training.pruning import WeightPruning, magnitude_below
from port_agent.training.state.resident_state import Persistents
from port_agent.training.trainer import StepEvent, Trainer
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import PRUNING_FORMAT
from port_planner.ir.bundle.pruning_schedule import Pruning
from tests.agent.jobs_small import make_job, write_job
from tests.agent.training.options import train_options
from tests.agent.training.trained_job import Stop

STEPS, CHOICE = 9, Pruning(0.75, end=6, every=2)


class InMemory:
    """Weights that are all in RAM, as far as pruning asks."""

    def __init__(self, **weights: torch.Tensor) -> None:
        self.weights = weights

    def for_each_chunk(self, key: str, function: Callable[[torch.Tensor], None], *, changes: bool) -> None:
        function(self.weights[key].view(-1))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_share_of_the_items_lies_below_the_magnitude(share: float, dtype: torch.dtype) -> None:
    weight = torch.randn(300, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    below = magnitude_below(cast(Persistents, InMemory(w=weight)), "w", share)
    assert share <= (weight.abs() <= below).float().mean().item() <= share + 0.01


def test_pruned_weights_stay_zero_between_looks_and_others_are_left() -> None:
    pruning, weight = WeightPruning(Pruning(0.5, end=4, every=4)), torch.arange(1.0, 9.0).view(2, 4)
    weights = cast(Persistents, InMemory(w=weight))
    for update in range(1, 4):
        pruning.updated(update, ["w"], weights)
    assert (weight != 0).all()
    pruning.updated(4, ["w"], weights)
    assert weight.tolist() == [[0, 0, 0, 0], [5, 6, 7, 8]]
    weight += 0.5
    pruning.updated(5, ["w"], weights)
    assert weight.tolist() == [[0, 0, 0, 0], [5.5, 6.5, 7.5, 8.5]]


def trained(folder: Path, *, stop_after: int | None = None, plan: int = 1) -> tuple[Trainer, list[float]]:
    t = Trainer(Bundle(folder / "job.port"), train_options(folder / f"state{plan}", folder, plan, STEPS, verify=1))
    losses: list[float] = []

    def on_step(event: StepEvent) -> None:
        losses.append(event.loss)
        if event.step == stop_after:
            raise Stop

    t.start()
    try:
        t.train(on_step, lambda *_: None)
    except Stop:
        t.close()
    return t, losses


@pytest.mark.slow
def test_a_pruned_training_equals_the_same_loop_in_plain_pytorch_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    job = make_job()
    job.pruning = CHOICE
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        write_job(tmp_path / name / "job.port", job)
    whole, losses = trained(tmp_path / "whole")
    assert whole.manifest.format == PRUNING_FORMAT
    weights = [
        k for k, layout in whole.manifest.layouts.items() if k.startswith("parameter/") and len(layout.shape) > 1
    ]
    for key in weights:
        assert 0.75 <= (whole.persistents.tensor(key) == 0).float().mean() < 0.8
    trained(tmp_path / "killed", stop_after=5)
    again, rest = trained(tmp_path / "killed")
    assert again.digest() == whole.digest() and losses[-len(rest) :] == rest
    kept, _ = trained(tmp_path / "whole", plan=0)
    assert kept.digest() == whole.digest(), "in RAM as on flash"
    kept.close()
    plain = tmp_path / "plain"
    plain.mkdir()
    job.pruning = None
    write_job(plain / "job.port", job)
    without, others = trained(plain)
    assert others[:2] == losses[:2] and without.digest() != whole.digest()
    for t in (whole, again, without):
        t.close()
