"""Steps of programs that count or keep tensors: known for as long as they are the same but for numbers, else refused by reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.base.errors import CaptureError
from port_planner.job import TrainingJob
from port_planner.steps_ahead import known_steps

ROWS, BATCH = 10, 4


class Program:
    """A loss that counts its calls and keeps what it gave; `of_count` makes it from the plain loss and both."""

    def __init__(self, of_count: Callable[[torch.Tensor, int, list[torch.Tensor]], torch.Tensor]) -> None:
        self.of_count, self.calls = of_count, 0
        self.kept: list[torch.Tensor] = []

    def __call__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = self.of_count(functional.cross_entropy(model(x), y), self.calls, self.kept)
        self.kept.append(loss.detach())
        return loss

    def job(self, **settings: Any) -> TrainingJob:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        data = [torch.randn(ROWS, 6), torch.randint(0, 4, (ROWS,))]
        return TrainingJob(model, self, torch.optim.SGD(model.parameters(), lr=0.1), data, BATCH, **settings)


def test_each_batch_has_its_numbers_in_the_slots_of_its_shape() -> None:
    found = known_steps(Program(lambda loss, calls, kept: loss / calls).job(), 5, within_s=60)
    assert found.numbers == tuple((float(calls),) for calls in range(1, 6))
    assert [(shape.rows, len({place.slot for place in shape.places})) for shape in found.shapes] == [(4, 1), (2, 1)]
    assert all(len(shape.places) == 2 for shape in found.shapes), "the gradient is divided, too"


def test_an_update_has_the_numbers_of_all_its_batches() -> None:
    found = known_steps(Program(lambda loss, calls, kept: loss / calls).job(accumulate=2), 3, within_s=60)
    assert (found.updates, len(found.numbers)) == (3, 6)


def test_what_is_counted_and_kept_without_consequence_leaves_no_number() -> None:
    assert known_steps(Program(lambda loss, calls, kept: loss).job(), 4, within_s=60).numbers == ()


@pytest.mark.parametrize(
    ("of_count", "reason"),
    [
        (lambda loss, calls, kept: loss if calls < 4 else loss.abs(), "update 4: the step runs other operators"),
        (lambda loss, calls, kept: loss if calls < 3 else loss * kept[0], "update 3: the step runs other|earlier step"),
        (lambda loss, calls, kept: loss * (kept or [loss])[-1], "update 2: .*an earlier step created"),
        (lambda loss, calls, kept: loss / max(float("inf") * (calls - 1), 1.0) if calls > 1 else loss / 1.0, "not finite"),
        (lambda loss, calls, kept: loss if loss > 100 else loss / calls, "update 1 cannot be followed without contents"),
        (lambda loss, calls, kept: torch.add(loss, loss, alpha=3 - calls), "update 2: the step runs other operators"),
        (lambda loss, calls, kept: loss + torch.tensor(float(calls)), "update 2: the step runs other operators"),
    ],
)  # fmt: skip
def test_steps_that_are_others_or_read_contents_are_not_known(of_count: Any, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        known_steps(Program(of_count).job(), 6, within_s=60)


def test_no_more_time_than_is_given_is_taken() -> None:
    with pytest.raises(CaptureError, match=r"1 of 6 updates could be followed in 0 s; plan it for fewer --epochs"):
        known_steps(Program(lambda loss, calls, kept: loss).job(), 6, within_s=0)
