"""What a program changes in a later step past torch's operators is refused, in the step and
in hooks after the update.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from port_agent.prepare.referee.unchanged_steps import ChangedStepError, unchanged_updates
from port_planner.base.errors import CaptureError
from port_planner.job import TrainingJob
from port_planner.steps_ahead import known_steps

_LATE = 3


_ARRAYS: list[Any] = []
_FIRST, _RUNNING = torch.ones(8, 6), torch.ones(8)
OUTSIDE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rate": (lambda job: job.optimizer.param_groups[0].update(lr=0.5), "the optimizer's groups, such as a learning rate"),
    "group": (lambda job: job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "the optimizer's groups"),
    "seed": (lambda job: torch.manual_seed(5), r"torch's random generator \(torch.manual_seed\)"),
    "state": (lambda job: job.optimizer.state.clear(), r"test_kept_parts\.py:\d+: the step uses the optimizer's state"),
    "new state": (lambda job: setattr(job.optimizer, "state", {}), "the step replaces the optimizer's state"),
    "memory": (lambda job: setattr(job.model[0].weight, "data", _FIRST), r"assigns 0\.weight\.data|which parameters the model has"),
    "buffer": (lambda job: setattr(job.model[1], "running_var", _RUNNING), "which buffers the model has|does not belong to the model"),
    "weights": (lambda job: _ARRAYS[0].__imul__(0.5), "writes to 0.weight of the model by other means"),
    "data": (lambda job: _ARRAYS[1].__imul__(0.5), "writes to the data by other means"),
}  # fmt: skip


def _job(*first: nn.Module) -> TrainingJob:
    model = nn.Sequential(*first, nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    data = [torch.randn(8, 6), torch.randint(0, 4, (8,))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingJob(model, lambda m, x, y: nn.functional.cross_entropy(m(x), y), optimizer, data, 4)


@pytest.mark.parametrize("what", OUTSIDE)
@pytest.mark.parametrize("in_hook", [False, True])
def test_what_reaches_training_past_the_operators_is_refused(what: str, in_hook: bool) -> None:
    change, reason = OUTSIDE[what]
    job, calls = _job(), [0]
    _ARRAYS[:] = [dict(job.model.named_parameters())["0.weight"].detach().numpy(), job.data[0].numpy()]

    def late(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == _LATE:
            change(job)

    (job.optimizer.register_step_post_hook if in_hook else job.model.register_forward_pre_hook)(late)
    generator = torch.get_rng_state()
    try:
        with pytest.raises(CaptureError, match=reason):
            known_steps(job, _LATE + 2, within_s=60)
    finally:
        torch.set_rng_state(generator)


class _Averages(nn.Module):
    """A layer that puts a new average into a buffer: in each step, from a late one on, or another one from then on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.average: torch.Tensor
        self.how, self.calls = how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        late = self.calls > _LATE
        with torch.no_grad():
            first, other = (0.9 * self.average + 0.1 * part for part in (x.mean(0), x.std(0)))
            if self.how == "each" or late:
                self.average = other if self.how == "another" and late else first
            elif self.how == "another":
                self.average = first
        return x


@pytest.mark.parametrize(("how", "right"), [("each", True), ("late", False), ("another", False)])
def test_buffers_may_be_replaced_by_results_as_in_the_first_step(how: str, right: bool) -> None:
    job = _job(_Averages(how))
    if right:
        assert known_steps(job, _LATE + 2, within_s=60)
    else:
        with pytest.raises(
            CaptureError,
            match=r"update 4: the step (changes which buffers|differs from the first .*test_kept_parts\.py:\d+: aten::copy_)",
        ):
            known_steps(job, _LATE + 2, within_s=60)


@pytest.mark.parametrize(("how", "right"), [("each", True), ("late", False), ("another", False)])
def test_the_referee_sees_which_results_replace_buffers(how: str, right: bool) -> None:
    job = _job(_Averages(how))
    if right:
        assert unchanged_updates(job, [job.data], 0, _LATE + 2, 600.0) == _LATE + 2
    else:
        with pytest.raises(
            ChangedStepError, match=r"update 4: .*(which buffers the model has|the model's buffers takes other)"
        ):
            unchanged_updates(job, [job.data], 0, _LATE + 2, 600.0)
