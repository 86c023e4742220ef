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


_LATE = 3


_ARRAYS: list[Any] = []
_FIRST, _RUNNING = torch.ones(8, 6), torch.ones(8)
OUTSIDE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rate": (lambda job: job.optimizer.param_groups[0].update(lr=0.5), "the optimizer's groups, such as a learning rate"),
    "group": (lambda job: job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "the optimizer's groups"),
    "seed": (lambda job: torch.manual_seed(5), r"torch's random generator \(torch.manual_seed\)"),
    "state": (lambda job: job.optimizer.state.clear(), r"test_steps_ahead\.py:\d+: the step uses the optimizer's state"),
    "new state": (lambda job: setattr(job.optimizer, "state", {}), "the step replaces the optimizer's state"),
    "memory": (lambda job: setattr(job.model[0].weight, "data", _FIRST), r"assigns 0\.weight\.data|which parameters the model has"),
    "buffer": (lambda job: setattr(job.model[1], "running_var", _RUNNING), "which buffers the model has|does not belong to the model"),
    "weights": (lambda job: _ARRAYS[0].__imul__(0.5), "writes to 0.weight of the model by other means"),
    "data": (lambda job: _ARRAYS[1].__imul__(0.5), "writes to the data by other means"),
}  # fmt: skip


@pytest.mark.parametrize("what", OUTSIDE)
@pytest.mark.parametrize("in_hook", [False, True])
def test_what_reaches_training_past_the_operators_is_refused(what: str, in_hook: bool) -> None:
    change, reason = OUTSIDE[what]
    program = Program(lambda loss, calls, kept: loss)
    job = program.job()
    _ARRAYS[:] = [dict(job.model.named_parameters())["0.weight"].detach().numpy(), job.data[0].numpy()]

    def late(*_: Any) -> None:
        if program.calls == _LATE:
            change(job)

    (job.optimizer.register_step_post_hook if in_hook else job.model.register_forward_pre_hook)(late)
    generator = torch.get_rng_state()
    try:
        with pytest.raises(CaptureError, match=reason):
            known_steps(job, _LATE + 2, within_s=60)
    finally:
        torch.set_rng_state(generator)


def test_no_more_time_than_is_given_is_taken() -> None:
    with pytest.raises(CaptureError, match=r"1 of 6 updates could be followed in 0 s; plan it for fewer --epochs"):
        known_steps(Program(lambda loss, calls, kept: loss).job(), 6, within_s=0)
