"""A loss or a state that is no finite number ends training; what was good stays."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from port_agent.training.state.finite import NonFiniteError, check_loss, check_state
from port_agent.training.trainer import Trainer
from port_planner import make_bundle
from port_planner.base.errors import ExitCode
from port_planner.ir.bundle.bundle import Bundle
from port_planner.job import JobError, TrainingJob
from tests.agent.jobs_small import state_on_flash, write_job
from tests.agent.training.options import train_options

BAD = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("bad", BAD)
def test_a_loss_that_is_no_number_is_named_with_its_step(bad: float) -> None:
    with pytest.raises(NonFiniteError, match="loss of step 7 is"):
        check_loss(bad, 7)
    check_loss(1e38, 7)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_number_among_many_is_found_in_every_kind(kind: torch.dtype, bad: float) -> None:
    numbers = torch.ones(1000, dtype=kind)
    check_state("parameter/w", numbers.view(torch.uint8), kind)
    numbers[321] = bad
    with pytest.raises(NonFiniteError, match="parameter/w"):
        check_state("parameter/w", numbers.view(torch.uint8), kind)


def test_good_numbers_whose_sum_overflows_are_good() -> None:
    check_state("parameter/w", torch.full((100,), 3e38).view(torch.uint8), torch.float32)
    with pytest.raises(NonFiniteError, match=r"parameter/w is no longer finite after the update \(-inf to inf\)"):
        check_state("parameter/w", torch.tensor([1.0, math.inf, -math.inf]).view(torch.uint8), torch.float32)


def test_whole_numbers_and_empty_storages_are_always_good() -> None:
    check_state("state/step", torch.full((8,), 255, dtype=torch.uint8), torch.int64)
    check_state("parameter/none", torch.empty(0, dtype=torch.uint8), torch.float32)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x[:, :1]).mean()
    return loss


def _diverging(rate: float, *, allow: bool = False) -> TrainingJob:
    """A job whose loss grows by orders of magnitude with each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 3000), nn.Linear(3000, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return TrainingJob(model, _loss, optimizer, [torch.ones(8, 1)], 1, seed=1, allow_nonfinite=allow)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e8, 1e25])
@pytest.mark.parametrize("paged", [False, True])
def test_training_stops_and_the_last_good_state_stays(rate: float, paged: bool, tmp_path: Path) -> None:
    write_job(tmp_path / "job.port", _diverging(rate), plan=state_on_flash)
    options = train_options(tmp_path / "state", tmp_path, plan=int(paged), epochs=20)
    t = Trainer(Bundle(tmp_path / "job.port"), options)
    losses: list[float] = []
    try:
        t.start()
        with pytest.raises(NonFiniteError) as caught:
            t.train(lambda e: losses.append(e.loss), lambda *_: None)
        assert caught.value.exit_code == ExitCode.DIVERGED
    finally:
        t.close()
    again = Trainer(Bundle(tmp_path / "job.port"), options)
    try:
        commit = again.start()
        assert all(map(math.isfinite, losses)) and commit.step in (len(losses), len(losses) - 1) and commit.step > 0
        for key in again.manifest.layouts:
            assert again.persistents.tensor(key).isfinite().all(), key
    finally:
        again.close()


@pytest.mark.slow
def test_a_job_may_say_that_it_goes_on(tmp_path: Path) -> None:
    write_job(tmp_path / "job.port", _diverging(1e25, allow=True))
    t = Trainer(Bundle(tmp_path / "job.port"), train_options(tmp_path / "state", tmp_path, steps=12))
    losses: list[float] = []
    try:
        t.start()
        t.train(lambda e: losses.append(e.loss), lambda *_: None)
    finally:
        t.close()
    assert len(losses) == 12 and not math.isfinite(losses[-1])


def test_a_step_whose_loss_is_not_finite_is_not_planned() -> None:
    job = _diverging(1e-3)
    job.data[0][3] = math.inf
    job.batch_size = 8
    with pytest.raises(JobError, match="loss on the first 8 rows of the data is"):
        make_bundle.prepare(job)
