"""What a script decides by Python's state after any number of updates shows in the operators that it calls, without their contents."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn

from port_agent.prepare.referee.process import Follow, followed
from port_agent.prepare.referee.unchanged_steps import ChangedStepError, unchanged_updates
from port_planner.ir.known_steps import KnownRead
from port_planner.job import TrainingJob
from tests.agent.jobs_small import BATCH, make_job

_LATE = 5
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]]


def _job(change: Callable[[torch.Tensor, bool], torch.Tensor]) -> TrainingJob:
    """Return the small job on full batches alone, whose loss is changed late."""
    job, steps = make_job(), [0]
    plain: Loss = job.loss_fn

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        steps[0] += 1
        found, aux = plain(model, x, y)
        return change(found, steps[0] > _LATE), aux

    return replace(job, loss_fn=loss, data=[column[: 2 * BATCH] for column in job.data])


def _without_gradient(loss: torch.Tensor, late: bool) -> torch.Tensor:
    with torch.set_grad_enabled(not late):
        factor = loss + 1
    return loss * factor


_CHANGES: dict[str, tuple[Callable[[torch.Tensor, bool], torch.Tensor], str]] = {
    "another operator": (lambda loss, late: loss * 0.5 if late else loss + 0.5, "mul.Tensor runs instead of"),
    "a further operator": (lambda loss, late: loss.clone() if late else loss, "clone.default runs instead of"),
    "another number": (lambda loss, late: loss * (0.5 if late else 1.0), r"is called with 0\.5 instead of 1\.0"),
    "another constant": (lambda loss, late: loss * torch.tensor(0.5 if late else 1.0), "takes other tensors"),
    "a gradient less": (
        lambda loss, late: loss + (loss * 0).detach() if late else loss + (loss * 0),
        "runs instead of|runs in addition",
    ),
    "no gradient of a part": (_without_gradient, "takes other tensors"),
    "an operator less": (lambda loss, late: loss if late else loss.clone(), "runs instead of|no longer runs"),
    "another tensor": (lambda loss, late: (loss + 1) * (loss if late else (loss + 2)), "runs instead of"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", _CHANGES)
def test_a_later_step_that_is_another_is_named_with_its_line_and_update(what: str) -> None:
    change, named = _CHANGES[what]
    job = _job(change)
    with pytest.raises(ChangedStepError, match=rf"update {_LATE + 1}: test_unchanged_steps\.py:\d+: aten\..*{named}"):
        unchanged_updates(job, [job.data], 0, 2 * _LATE, 600.0)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_that_stay_the_same_are_counted_and_leave_weights_alone(accumulate: int) -> None:
    job = make_job(accumulate=accumulate)
    before = [p.detach().clone() for p in job.model.parameters()]
    assert unchanged_updates(job, [job.data], 2, 6, 600.0) == 4
    assert all(torch.equal(p, was) for p, was in zip(job.model.parameters(), before, strict=True))


class _Carries(nn.Module):
    """An LSTM that carries its state in buffers, from one step to the next."""

    h: torch.Tensor
    c: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.steps = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2), 0
        self.register_buffer("h", torch.zeros(1, BATCH, 6))
        self.register_buffer("c", torch.zeros(1, BATCH, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, (h, c) = self.cell(x, (self.h, self.c))
        self.h, self.c = h.detach(), c.detach()
        self.steps += 1
        return self.head(out[:, -1]) * (0.5 if self.steps > self.late else 1.0)

    late = 1 << 30


def _carrying(late: int) -> TrainingJob:
    model = _Carries()
    model.late = late
    data = [torch.randn(2 * BATCH, 3, 4), torch.randn(2 * BATCH, 2)]
    return TrainingJob(
        model, lambda m, x, y: (m(x) - y).pow(2).mean(), torch.optim.SGD(model.parameters(), 0.1), data, BATCH
    )


def test_buffers_that_results_replace_may_lie_otherwise_in_memory_from_the_second_step_on() -> None:
    job = _carrying(1 << 30)
    assert unchanged_updates(job, [job.data], 2, 10, 60.0) == 8
    job = _carrying(1)
    with pytest.raises(ChangedStepError, match=r"update 4: .*is called with 0\.5 instead of 1\.0"):
        unchanged_updates(job, [job.data], 2, 10, 60.0)


def test_ranges_that_a_profiler_marks_are_no_difference() -> None:
    def marked(loss: torch.Tensor, late: bool) -> torch.Tensor:
        kept.append(object())  # so that the range is made at another address
        with torch.profiler.record_function("loss"):
            return loss + 0.5

    kept = list[object]()
    job = _job(marked)
    assert unchanged_updates(job, [job.data], 0, 12, 600.0) == 12


def test_a_hook_after_steps_that_becomes_another_is_named_with_its_line_and_update() -> None:
    job, updates = make_job(accumulate=2), io.StringIO()

    def hook(*_: Any) -> None:
        updates.write("x")
        for parameter in job.model.parameters():
            parameter.data.mul_(0.5 if updates.tell() > _LATE else 1.0)

    job.optimizer.register_step_post_hook(hook)
    with pytest.raises(ChangedStepError, match=rf"update {_LATE + 1}: test_unchanged_steps\.py:\d+: aten\.mul_"):
        unchanged_updates(job, [job.data], 0, 2 * _LATE, 600.0)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_rate_or_data_that_a_later_step_changes_is_named(in_place: bool) -> None:
    job, steps = make_job(), io.StringIO()
    array, plain = job.data[0].numpy(), job.loss_fn

    def loss(model: nn.Module, *batch: torch.Tensor) -> Any:
        steps.write("x")
        if steps.tell() == _LATE and in_place:
            array[:] *= 0.5
        elif steps.tell() == _LATE:
            job.optimizer.param_groups[0]["lr"] *= 0.5
        return plain(model, *batch)

    job.loss_fn = loss
    named = (
        "writes to the data by other means" if in_place else rf"update {_LATE}: the step changes the optimizer's groups"
    )
    with pytest.raises(ChangedStepError, match=named):
        unchanged_updates(job, [job.data], 0, 2 * _LATE, 600.0)


def test_a_loss_that_asks_for_contents_is_not_looked_at() -> None:
    job = _job(lambda loss, _: loss if loss.item() < 1e9 else loss * 2)
    assert unchanged_updates(job, [job.data], 0, 4, 600.0) == 0


def test_what_each_step_reads_is_known() -> None:
    def checked(loss: torch.Tensor, late: bool) -> torch.Tensor:
        if not torch.isfinite(loss) or int(loss.sign()) != 3:  # of a bundle, both are compared in each step
            return loss * (0.5 if late else 1.0)
        return loss

    line = f"test_unchanged_steps.py:{checked.__code__.co_firstlineno + 1}"
    reads = [KnownRead(0, BATCH, line, True), KnownRead(0, BATCH, line, 1)]
    job = _job(checked)
    assert unchanged_updates(job, [job.data], 0, _LATE - 1, 600.0, reads=reads) == _LATE - 1
    job = _job(checked)
    with pytest.raises(ChangedStepError, match=rf"update {_LATE + 1}: .*with 0\.5 instead of 1\.0"):
        unchanged_updates(job, [job.data], 0, 2 * _LATE, 600.0, reads=reads)
    assert unchanged_updates(_job(checked), [job.data], 0, 4, 600.0, reads=reads[:1]) == 0, (
        "a further read is not known"
    )


def test_no_more_are_run_than_the_time_allows() -> None:
    job = make_job()
    assert unchanged_updates(job, [job.data], 0, 1000, 0.0) == 1


@pytest.mark.slow
def test_the_script_alone_goes_on_without_contents_for_what_will_be_trained() -> None:
    job = _job(_CHANGES["another number"][0])
    follow = Follow("", "", "", "cpu", 1, (len(job.data[0]),), True, 2, 2, 0.0, 0, 4, 600.0)
    assert followed(job, follow).unchanged_updates == 2
    changed = followed(_job(_CHANGES["another number"][0]), structs.replace(follow, trained_updates=2 * _LATE))
    assert changed.changed.startswith(f"update {_LATE + 1}: ") and not changed.unchanged_updates
